/* Tools and their calls for the JVM. */

#include "edge_jni.h"

static void state_tools(JNIEnv *env, jclass class, jlong session, jbyteArray tools)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    jbyte *bytes = tools ? (*env)->GetByteArrayElements(env, tools, NULL) : NULL;
    if (tools && !bytes)
        return;
    edge_status status = edge_tools(session_of(session), (const char *)bytes, bytes ? (size_t)(*env)->GetArrayLength(env, tools) : 0, &error);
    if (bytes)
        (*env)->ReleaseByteArrayElements(env, tools, bytes, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
}

static void choose_calls(JNIEnv *env, jclass class, jlong session, jbyteArray choice, jint parallel)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    jbyte *bytes = (*env)->GetByteArrayElements(env, choice, NULL);
    if (!bytes)
        return;
    edge_status status = edge_choose(session_of(session), (const char *)bytes, (uint32_t)parallel, &error);
    (*env)->ReleaseByteArrayElements(env, choice, bytes, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
}

static jint count_calls(JNIEnv *env, jclass class, jlong session)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    int64_t count = edge_calls(session_of(session), 0, NULL, &error);
    if (count < 0)
        jni_raise(env, &error);
    return (jint)count;
}

static jbyteArray read_call(JNIEnv *env, jclass class, jlong session, jint index, jint field)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_call call = {.size = sizeof call};
    if (edge_calls(session_of(session), (uint32_t)index, &call, &error) < 0) {
        jni_raise(env, &error);
        return NULL;
    }
    const char *text = field == 0 ? call.id : field == 1 ? call.name : call.arguments;
    return jni_bytes(env, text, jni_length(text));
}

const JNINativeMethod TOOLS[TOOL_METHODS] = {
    METHOD("tools", "(J[B)V", state_tools),
    METHOD("choose", "(J[BI)V", choose_calls),
    METHOD("calls", "(J)I", count_calls),
    METHOD("call", "(JII)[B", read_call),
};

/* edge.h for the JVM and Android: the native methods of Native.kt, registered when the library is loaded.
 *
 * Texts are passed as arrays of UTF-8 bytes, since JNI strings use modified UTF-8, which encodes emoji differently.
 * Structs are passed as arrays of bytes in C's layout (EdgeOptions.kt). Handles are pointers in a long; Native.kt's callers
 * use them only while they are open. A failed call throws EdgeException. */

#include "edge_jni.h"

static jclass exception_class; /* set once, in JNI_OnLoad */
static jmethodID make_exception;

jbyteArray jni_bytes(JNIEnv *env, const char *text, size_t length)
{
    jbyteArray bytes = (*env)->NewByteArray(env, (jsize)length);
    if (bytes)
        (*env)->SetByteArrayRegion(env, bytes, 0, (jsize)length, (const jbyte *)text);
    return bytes;
}

size_t jni_length(const char *text)
{
    size_t length = 0;
    while (text && text[length])
        length++;
    return length;
}

void jni_raise(JNIEnv *env, const edge_error *error)
{
    jbyteArray message = jni_bytes(env, error->message, jni_length(error->message));
    jvalue arguments[2] = {{.i = error->code}, {.l = message}};
    jobject exception = message ? (*env)->NewObjectA(env, exception_class, make_exception, arguments) : NULL;
    if (exception)
        (*env)->Throw(env, exception);
}

/* ---- models ----------------------------------------------------------------------------------------------------- */

static jlong open_model(JNIEnv *env, jclass class, jbyteArray path, jint fd, jlong offset, jlong length)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_model *model = NULL;
    /* The array ends with \0. */
    jbyte *text = path ? (*env)->GetByteArrayElements(env, path, NULL) : NULL;
    if (path && !text)
        return 0; /* the JVM has thrown OutOfMemoryError */
    edge_source source = {sizeof source, (const char *)text, fd, (uint64_t)offset, (uint64_t)length};
    edge_status status = edge_open(&source, &model, &error);
    if (text)
        (*env)->ReleaseByteArrayElements(env, path, text, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
    return (jlong)(intptr_t)model;
}

static void close_model(JNIEnv *env, jclass class, jlong model)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    if (edge_close(model_of(model), &error) < 0)
        jni_raise(env, &error);
}

static void read_info(JNIEnv *env, jclass class, jlong model, jbyteArray bytes)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_model_info info = {.size = sizeof info};
    if (edge_info(model_of(model), &info, &error) < 0)
        jni_raise(env, &error);
    else
        (*env)->SetByteArrayRegion(env, bytes, 0, sizeof info, (const jbyte *)&info);
}

static jbyteArray read_text(JNIEnv *env, jclass class, jlong address)
{
    (void)class;
    const char *text = (const char *)(intptr_t)address;
    return jni_bytes(env, text, jni_length(text));
}

/* ---- options and readings --------------------------------------------------------------------------------------- */

typedef struct { /* edge_options with its texts; too long ones are cut, at a length that the runtime still refuses */
    edge_options options;
    char isa[MAX_NAME + 1], cache[MAX_PATH + 1], npu[MAX_PATH + 1], stop[MOST_STOPS + 1][LONGEST_STOP + 2];
    const char *stop_pointers[MOST_STOPS + 1];
} option_texts;

void jni_copy(JNIEnv *env, jbyteArray bytes, char *to, jsize most)
{
    jsize length = (*env)->GetArrayLength(env, bytes);
    length = length < most ? length : most;
    (*env)->GetByteArrayRegion(env, bytes, 0, length, (jbyte *)to);
    to[length] = 0;
}

static void read_options(JNIEnv *env, jbyteArray options, jbyteArray isa, jbyteArray cache, jbyteArray npu,
                         jobjectArray stop, option_texts *to)
{
    (*env)->GetByteArrayRegion(env, options, 0, sizeof to->options, (jbyte *)&to->options);
    jsize count = (*env)->GetArrayLength(env, stop);
    count = count < MOST_STOPS + 1 ? count : MOST_STOPS + 1;
    for (jsize at = 0; at < count; at++) {
        jbyteArray text = (*env)->GetObjectArrayElement(env, stop, at);
        jni_copy(env, text, to->stop[at], LONGEST_STOP + 1);
        (*env)->DeleteLocalRef(env, text);
        to->stop_pointers[at] = to->stop[at];
    }
    if (isa)
        jni_copy(env, isa, to->isa, MAX_NAME);
    to->options.isa = isa ? to->isa : NULL;
    if (cache)
        jni_copy(env, cache, to->cache, MAX_PATH);
    to->options.cache = cache ? to->cache : NULL;
    if (npu)
        jni_copy(env, npu, to->npu, MAX_PATH);
    to->options.npu = npu ? to->npu : NULL;
    to->options.stop = to->stop_pointers;
    to->options.stop_count = (uint32_t)count;
}

static jlong begin_session(JNIEnv *env, jclass class, jlong model, jbyteArray options, jbyteArray isa,
                           jbyteArray cache, jbyteArray npu, jobjectArray stop)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_session *session = NULL;
    option_texts texts;
    read_options(env, options, isa, cache, npu, stop, &texts);
    if (edge_begin(model_of(model), &texts.options, &session, &error) < 0)
        jni_raise(env, &error);
    return (jlong)(intptr_t)session;
}

static void set_options(JNIEnv *env, jclass class, jlong session, jbyteArray options, jbyteArray isa,
                        jobjectArray stop)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    option_texts texts;
    read_options(env, options, isa, NULL, NULL, stop, &texts);
    if (edge_set(session_of(session), &texts.options, &error) < 0)
        jni_raise(env, &error);
}

static void read_sensors(JNIEnv *env, jclass class, jlong session, jbyteArray bytes)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_readings readings;
    (*env)->GetByteArrayRegion(env, bytes, 0, sizeof readings, (jbyte *)&readings);
    if (edge_read(session_of(session), &readings, &error) < 0)
        jni_raise(env, &error);
}

/* ---- conversations ---------------------------------------------------------------------------------------------- */

static void end_session(JNIEnv *env, jclass class, jlong session)
{
    (void)env, (void)class;
    edge_end(session_of(session));
}

static void append(JNIEnv *env, jlong session, jint role, const void *text, jsize count)
{
    edge_error error = {.size = sizeof error};
    if (edge_append(session_of(session), role, text, (size_t)count, &error) < 0)
        jni_raise(env, &error);
}

static void constrain_answers(JNIEnv *env, jclass class, jlong session, jint form, jbyteArray text)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    jbyte *bytes = (*env)->GetByteArrayElements(env, text, NULL);
    if (!bytes)
        return;
    edge_status status = edge_constrain(session_of(session), form, (const char *)bytes, (size_t)(*env)->GetArrayLength(env, text), &error);
    (*env)->ReleaseByteArrayElements(env, text, bytes, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
}

/* biases: of edge_logit_bias. */
static void bias_answers(JNIEnv *env, jclass class, jlong session, jbyteArray biases)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    jbyte *bytes = (*env)->GetByteArrayElements(env, biases, NULL);
    if (!bytes)
        return;
    size_t count = (size_t)(*env)->GetArrayLength(env, biases) / sizeof(edge_logit_bias);
    edge_status status = edge_bias(session_of(session), (const edge_logit_bias *)(void *)bytes, count, &error);
    (*env)->ReleaseByteArrayElements(env, biases, bytes, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
}

static void append_text(JNIEnv *env, jclass class, jlong session, jint role, jbyteArray text)
{
    (void)class;
    jbyte *bytes = (*env)->GetByteArrayElements(env, text, NULL);
    if (!bytes)
        return;
    append(env, session, role, bytes, (*env)->GetArrayLength(env, text));
    (*env)->ReleaseByteArrayElements(env, text, bytes, JNI_ABORT);
}

static void append_ids(JNIEnv *env, jclass class, jlong session, jintArray ids)
{
    (void)class;
    jint *values = (*env)->GetIntArrayElements(env, ids, NULL);
    if (!values)
        return;
    append(env, session, EDGE_IDS, values, (*env)->GetArrayLength(env, ids));
    (*env)->ReleaseIntArrayElements(env, ids, values, JNI_ABORT);
}

/* Writes the text and the prompt's counts, and returns the token, the finish reason and the length in bits 32 to 63, 16 to 31
 * and 0 to 15. */
static jlong next_piece(JNIEnv *env, jclass class, jlong session, jbyteArray text, jintArray prompt)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_piece piece = {.size = sizeof piece};
    if (edge_next(session_of(session), &piece, &error) < 0)
        return jni_raise(env, &error), 0;
    (*env)->SetByteArrayRegion(env, text, 0, (jsize)piece.length, (const jbyte *)piece.text);
    (*env)->SetIntArrayRegion(env, prompt, 0, 2, (const jint[]){(jint)piece.done, (jint)piece.asked});
    return (jlong)((uint64_t)(uint32_t)piece.token << 32 | (uint64_t)(uint16_t)piece.finish << 16 |
                   (uint16_t)piece.length);
}

static void cancel_answer(JNIEnv *env, jclass class, jlong session)
{
    (void)env, (void)class;
    edge_cancel(session_of(session));
}

static void rewind_turns(JNIEnv *env, jclass class, jlong session, jint turns)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    if (edge_rewind(session_of(session), (uint32_t)turns, &error) < 0)
        jni_raise(env, &error);
}

static jlong save_state(JNIEnv *env, jclass class, jlong session, jint fd, jbyteArray buffer)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_stream stream = {.size = sizeof stream, .fd = fd};
    if (buffer) {
        stream.capacity = (uint64_t)(*env)->GetArrayLength(env, buffer);
        stream.buffer = (*env)->GetByteArrayElements(env, buffer, NULL);
        if (!stream.buffer)
            return 0;
    }
    edge_status status = edge_save(session_of(session), &stream, &error);
    if (buffer)
        (*env)->ReleaseByteArrayElements(env, buffer, stream.buffer, 0);
    if (status < 0)
        jni_raise(env, &error);
    return (jlong)stream.length;
}

/* Lends an array's content to a stream, if there is an array. Returns 0 if the JVM has thrown OutOfMemoryError. */
static int lend_stream(JNIEnv *env, jbyteArray buffer, edge_stream *stream)
{
    if (!buffer)
        return 1;
    stream->capacity = stream->length = (uint64_t)(*env)->GetArrayLength(env, buffer);
    stream->buffer = (*env)->GetByteArrayElements(env, buffer, NULL);
    return stream->buffer != NULL;
}

static void take_back(JNIEnv *env, jbyteArray buffer, edge_stream *stream, edge_status status, const edge_error *error)
{
    if (buffer)
        (*env)->ReleaseByteArrayElements(env, buffer, stream->buffer, JNI_ABORT);
    if (status < 0)
        jni_raise(env, error);
}

static void load_state(JNIEnv *env, jclass class, jlong session, jint fd, jbyteArray buffer)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_stream stream = {.size = sizeof stream, .fd = fd};
    if (lend_stream(env, buffer, &stream))
        take_back(env, buffer, &stream, edge_load(session_of(session), &stream, &error), &error);
}

/* Without file and array: removes the adapter. */
static void set_adapter(JNIEnv *env, jclass class, jlong session, jint fd, jbyteArray buffer, jdouble scale)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_stream stream = {.size = sizeof stream, .fd = fd}, *adapter = fd >= 0 || buffer ? &stream : NULL;
    if (lend_stream(env, buffer, &stream))
        take_back(env, buffer, &stream, edge_set_adapter(session_of(session), adapter, scale, &error), &error);
}

static void trim_memory(JNIEnv *env, jclass class, jlong session, jint level)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    if (edge_trim(session_of(session), level, &error) < 0)
        jni_raise(env, &error);
}

static void read_usage(JNIEnv *env, jclass class, jlong session, jbyteArray bytes)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    edge_usage usage = {.size = sizeof usage};
    if (edge_use(session_of(session), &usage, &error) < 0)
        jni_raise(env, &error);
    else
        (*env)->SetByteArrayRegion(env, bytes, 0, sizeof usage, (const jbyte *)&usage);
}

/* Returns the number of ids, of which as many are written as fit. */
static jint read_threads(JNIEnv *env, jclass class, jlong session, jintArray ids)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    jint *values = (*env)->GetIntArrayElements(env, ids, NULL);
    if (!values)
        return 0;
    int64_t count = edge_thread_ids(session_of(session), values, (size_t)(*env)->GetArrayLength(env, ids), &error);
    (*env)->ReleaseIntArrayElements(env, ids, values, 0);
    if (count < 0)
        jni_raise(env, &error);
    return (jint)count;
}

/* ids: NULL only counts. */
static jlong count_tokens(JNIEnv *env, jclass class, jlong session, jbyteArray text, jint special, jintArray ids)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    jbyte *bytes = (*env)->GetByteArrayElements(env, text, NULL);
    jint *values = bytes && ids ? (*env)->GetIntArrayElements(env, ids, NULL) : NULL;
    int64_t count = 0;
    if (bytes && (values || !ids)) {
        size_t length = (size_t)(*env)->GetArrayLength(env, text);
        size_t capacity = ids ? (size_t)(*env)->GetArrayLength(env, ids) : 0;
        count = edge_tokenize(session_of(session), (const char *)bytes, length, (uint32_t)special, values, capacity,
                              &error);
    }
    if (values)
        (*env)->ReleaseIntArrayElements(env, ids, values, 0);
    if (bytes)
        (*env)->ReleaseByteArrayElements(env, text, bytes, JNI_ABORT);
    if (count < 0)
        jni_raise(env, &error);
    return count;
}

enum { TEXTS_AT_ONCE = 64 };

/* texts: one behind the other. vectors: floats, as bytes. */
static void embed_texts(JNIEnv *env, jclass class, jlong session, jbyteArray texts, jintArray lengths, jbyteArray prompt,
                        jint dimensions, jint unscaled, jint truncate, jbyteArray vectors)
{
    (void)class;
    char name[MAX_PATH + 1];
    edge_error error = {.size = sizeof error};
    edge_embedding options = {sizeof options, NULL, (uint32_t)dimensions, 0, (uint32_t)unscaled, (uint32_t)truncate};
    if (prompt) {
        jni_copy(env, prompt, name, MAX_PATH);
        options.prompt = name;
    }
    const jsize count = (*env)->GetArrayLength(env, lengths);
    const size_t each = count ? (size_t)((*env)->GetArrayLength(env, vectors) / count) / sizeof(float) : 0;
    jbyte *bytes = (*env)->GetByteArrayElements(env, texts, NULL);
    jint *sizes = bytes ? (*env)->GetIntArrayElements(env, lengths, NULL) : NULL;
    jbyte *out = sizes ? (*env)->GetByteArrayElements(env, vectors, NULL) : NULL;
    const char *at = (const char *)bytes;
    float *vector = (float *)(void *)out;
    edge_status status = EDGE_OK;
    for (jsize done = 0; out && !status && done < count;) {
        const char *some[TEXTS_AT_ONCE];
        size_t some_lengths[TEXTS_AT_ONCE], found = 0;
        for (; found < TEXTS_AT_ONCE && done < count; found++, done++) {
            some[found] = at;
            some_lengths[found] = (size_t)sizes[done];
            at += sizes[done];
        }
        status = edge_embed(session_of(session), some, some_lengths, found, &options, vector, found * each, &error);
        vector += found * each;
    }
    if (out)
        (*env)->ReleaseByteArrayElements(env, vectors, out, 0);
    if (sizes)
        (*env)->ReleaseIntArrayElements(env, lengths, sizes, JNI_ABORT);
    if (bytes)
        (*env)->ReleaseByteArrayElements(env, texts, bytes, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
}

/* ---- registration ----------------------------------------------------------------------------------------------- */

static const JNINativeMethod METHODS[] = {
    METHOD("open", "([BIJJ)J", open_model),
    METHOD("close", "(J)V", close_model),
    METHOD("info", "(J[B)V", read_info),
    METHOD("text", "(J)[B", read_text),
    METHOD("begin", "(J[B[B[B[B[[B)J", begin_session),
    METHOD("set", "(J[B[B[[B)V", set_options),
    METHOD("constrain", "(JI[B)V", constrain_answers),
    METHOD("bias", "(J[B)V", bias_answers),
    METHOD("read", "(J[B)V", read_sensors),
    METHOD("end", "(J)V", end_session),
    METHOD("append", "(JI[B)V", append_text),
    METHOD("appendIds", "(J[I)V", append_ids),
    METHOD("next", "(J[B[I)J", next_piece),
    METHOD("cancel", "(J)V", cancel_answer),
    METHOD("rewind", "(JI)V", rewind_turns),
    METHOD("save", "(JI[B)J", save_state),
    METHOD("load", "(JI[B)V", load_state),
    METHOD("setAdapter", "(JI[BD)V", set_adapter),
    METHOD("trim", "(JI)V", trim_memory),
    METHOD("use", "(J[B)V", read_usage),
    METHOD("threads", "(J[I)I", read_threads),
    METHOD("tokenize", "(J[BI[I)J", count_tokens),
    METHOD("embed", "(J[B[I[BIII[B)V", embed_texts),
};

EDGE_API jint JNI_OnLoad(JavaVM *vm, void *reserved);

EDGE_API jint JNI_OnLoad(JavaVM *vm, void *reserved)
{
    (void)reserved;
    JNIEnv *env;
    if ((*vm)->GetEnv(vm, (void **)&env, JNI_VERSION_1_6))
        return -1;
    jclass native = (*env)->FindClass(env, "edge/runtime/Native");
    jclass exception = native ? (*env)->FindClass(env, "edge/runtime/EdgeException") : NULL;
    if (!exception)
        return -1; /* the JVM says which class is missing */
    exception_class = (*env)->NewGlobalRef(env, exception);
    make_exception = (*env)->GetMethodID(env, exception, "<init>", "(I[B)V");
    if (!make_exception || (*env)->RegisterNatives(env, native, METHODS, sizeof METHODS / sizeof *METHODS) ||
        (*env)->RegisterNatives(env, native, SENSES, SENSE_METHODS) ||
        (*env)->RegisterNatives(env, native, TOOLS, TOOL_METHODS))
        return -1;
    return JNI_VERSION_1_6;
}

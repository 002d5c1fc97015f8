/* Speech, pictures and sounds for the JVM. */

#include "edge_jni.h"

enum { SAMPLES_AT_ONCE = 4096, MOST_PROMPT = 4096 };

static void listen(JNIEnv *env, jclass class, jlong session, jbyteArray path, jint fd, jlong offset, jlong length,
                   jbyteArray bytes, jbyteArray language, jbyteArray prompt)
{
    (void)class;
    char file[MAX_PATH + 1], code[MAX_NAME + 1], before[MOST_PROMPT + 1];
    edge_error error = {.size = sizeof error};
    edge_hearing options;
    (*env)->GetByteArrayRegion(env, bytes, 0, sizeof options, (jbyte *)&options);
    if (path)
        jni_copy(env, path, file, MAX_PATH);
    if (language)
        jni_copy(env, language, code, MAX_NAME);
    if (prompt)
        jni_copy(env, prompt, before, MOST_PROMPT);
    options.language = language ? code : NULL;
    options.prompt = prompt ? before : NULL;
    const edge_source source = {sizeof source, path ? file : NULL, fd, (uint64_t)offset, (uint64_t)length};
    if (edge_listen(session_of(session), path || fd >= 0 ? &source : NULL, &options, &error) < 0)
        jni_raise(env, &error);
}

static jlong hear(JNIEnv *env, jclass class, jlong session, jshortArray samples, jint from, jbyteArray bytes)
{
    (void)class;
    const jsize length = (*env)->GetArrayLength(env, samples);
    edge_error error = {.size = sizeof error};
    edge_segment segment = {.size = sizeof segment};
    int64_t taken = 0;
    do {
        jshort some[SAMPLES_AT_ONCE];
        float values[SAMPLES_AT_ONCE];
        jsize left = length - from - (jsize)taken, count = left < SAMPLES_AT_ONCE ? left : SAMPLES_AT_ONCE;
        (*env)->GetShortArrayRegion(env, samples, from + (jsize)taken, count, some);
        for (jsize i = 0; i < count; i++)
            values[i] = (float)some[i] / 32768;
        const int64_t heard = edge_hear(session_of(session), values, (size_t)count, &segment, &error);
        if (heard < 0) {
            jni_raise(env, &error);
            return 0;
        }
        taken += heard;
    } while (!segment.length && !segment.finish && from + taken < length);
    (*env)->SetByteArrayRegion(env, bytes, 0, sizeof segment, (const jbyte *)&segment);
    return (jlong)segment.finish << 32 | (jlong)taken;
}

/* colors: 0xAARRGGBB, of which RGBA is made in the JVM's copy or, where it lends the array itself, in that, and taken back. */
static void swap_colors(uint32_t *colors, jsize count)
{
    for (jsize i = 0; i < count; i++)
        colors[i] = (colors[i] & 0xFF00FF00) | (colors[i] >> 16 & 0xFF) | (colors[i] & 0xFF) << 16;
}

static void show_image(JNIEnv *env, jclass class, jlong session, jbyteArray path, jint fd, jlong offset, jlong length,
                       jintArray colors, jint width, jint height, jint tokens)
{
    (void)class;
    char file[MAX_PATH + 1];
    edge_error error = {.size = sizeof error};
    if (path)
        jni_copy(env, path, file, MAX_PATH);
    const jsize count = (*env)->GetArrayLength(env, colors);
    jint *values = (*env)->GetIntArrayElements(env, colors, NULL);
    if (!values)
        return;
    const edge_source source = {sizeof source, path ? file : NULL, fd, (uint64_t)offset, (uint64_t)length};
    const edge_picture picture = {sizeof picture, values, (uint32_t)width, (uint32_t)height, 4 * (uint32_t)width, 4, (uint32_t)tokens};
    swap_colors((uint32_t *)values, count);
    edge_status status = edge_image(session_of(session), &source, &picture, &error);
    swap_colors((uint32_t *)values, count);
    (*env)->ReleaseIntArrayElements(env, colors, values, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
}

static jint count_image(JNIEnv *env, jclass class, jlong model, jint width, jint height, jint tokens)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    int64_t count = edge_image_tokens(model_of(model), (uint32_t)width, (uint32_t)height, (uint32_t)tokens, &error);
    if (count < 0)
        jni_raise(env, &error);
    return (jint)count;
}

static void play_sound(JNIEnv *env, jclass class, jlong session, jbyteArray path, jint fd, jlong offset, jlong length,
                       jfloatArray samples, jint rate)
{
    (void)class;
    char file[MAX_PATH + 1];
    edge_error error = {.size = sizeof error};
    if (path)
        jni_copy(env, path, file, MAX_PATH);
    float *values = (*env)->GetFloatArrayElements(env, samples, NULL);
    if (!values)
        return;
    const edge_source source = {sizeof source, path ? file : NULL, fd, (uint64_t)offset, (uint64_t)length};
    const size_t count = (size_t)(*env)->GetArrayLength(env, samples);
    edge_status status = edge_sound(session_of(session), &source, values, count, (uint32_t)rate, &error);
    (*env)->ReleaseFloatArrayElements(env, samples, values, JNI_ABORT);
    if (status < 0)
        jni_raise(env, &error);
}

static jint count_sound(JNIEnv *env, jclass class, jlong model, jint samples, jint rate)
{
    (void)class;
    edge_error error = {.size = sizeof error};
    int64_t count = edge_sound_tokens(model_of(model), (uint64_t)samples, (uint32_t)rate, &error);
    if (count < 0)
        jni_raise(env, &error);
    return (jint)count;
}

const JNINativeMethod SENSES[SENSE_METHODS] = {
    METHOD("listen", "(J[BIJJ[B[B[B)V", listen),
    METHOD("hear", "(J[SI[B)J", hear),
    METHOD("image", "(J[BIJJ[IIII)V", show_image),
    METHOD("imageTokens", "(JIII)I", count_image),
    METHOD("sound", "(J[BIJJ[FI)V", play_sound),
    METHOD("soundTokens", "(JII)I", count_sound),
};

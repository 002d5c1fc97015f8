/* The part of the Java Native Interface that edge_jni.c uses, from the specification, which numbers the functions of
 * its tables. With it a library for Android needs neither a JDK nor Android's NDK. tests/apps/test_kotlin.py compares it
 * with a JDK's header. */
#ifndef EDGE_JNI_H
#define EDGE_JNI_H

#include <stdint.h>

typedef int32_t jint;
typedef int64_t jlong;
typedef int16_t jshort;
typedef int8_t jbyte;
typedef double jdouble;
typedef uint8_t jboolean;
typedef jint jsize;
typedef void *jobject;
typedef jobject jclass, jthrowable, jarray, jobjectArray, jbyteArray, jintArray, jshortArray, jfloatArray;
typedef void *jmethodID;
typedef union { jint i; jlong j; jdouble d; jobject l; } jvalue;
typedef struct { char *name, *signature; void *fnPtr; } JNINativeMethod;

enum { JNI_VERSION_1_6 = 0x00010006, JNI_ABORT = 2 };

typedef const struct jni_functions *JNIEnv;
typedef const struct vm_functions *JavaVM;

struct jni_functions { /* the comments are indexes */
    void *unused_0[6];
    jclass (*FindClass)(JNIEnv *, const char *); /* 6 */
    void *unused_7[6];
    jint (*Throw)(JNIEnv *, jthrowable); /* 13 */
    void *unused_14[7];
    jobject (*NewGlobalRef)(JNIEnv *, jobject); /* 21 */
    void *unused_22[1];
    void (*DeleteLocalRef)(JNIEnv *, jobject); /* 23 */
    void *unused_24[6];
    jobject (*NewObjectA)(JNIEnv *, jclass, jmethodID, const jvalue *); /* 30 */
    void *unused_31[2];
    jmethodID (*GetMethodID)(JNIEnv *, jclass, const char *, const char *); /* 33 */
    void *unused_34[137];
    jsize (*GetArrayLength)(JNIEnv *, jarray); /* 171 */
    void *unused_172[1];
    jobject (*GetObjectArrayElement)(JNIEnv *, jobjectArray, jsize); /* 173 */
    void *unused_174[2];
    jbyteArray (*NewByteArray)(JNIEnv *, jsize); /* 176 */
    void *unused_177[7];
    jbyte *(*GetByteArrayElements)(JNIEnv *, jbyteArray, jboolean *); /* 184 */
    void *unused_185[2];
    jint *(*GetIntArrayElements)(JNIEnv *, jintArray, jboolean *); /* 187 */
    void *unused_188;
    float *(*GetFloatArrayElements)(JNIEnv *, jfloatArray, jboolean *); /* 189 */
    void *unused_190[2];
    void (*ReleaseByteArrayElements)(JNIEnv *, jbyteArray, jbyte *, jint); /* 192 */
    void *unused_193[2];
    void (*ReleaseIntArrayElements)(JNIEnv *, jintArray, jint *, jint); /* 195 */
    void *unused_196;
    void (*ReleaseFloatArrayElements)(JNIEnv *, jfloatArray, float *, jint); /* 197 */
    void *unused_198[2];
    void (*GetByteArrayRegion)(JNIEnv *, jbyteArray, jsize, jsize, jbyte *); /* 200 */
    void *unused_201[1];
    void (*GetShortArrayRegion)(JNIEnv *, jshortArray, jsize, jsize, jshort *); /* 202 */
    void *unused_203[5];
    void (*SetByteArrayRegion)(JNIEnv *, jbyteArray, jsize, jsize, const jbyte *); /* 208 */
    void *unused_209[2];
    void (*SetIntArrayRegion)(JNIEnv *, jintArray, jsize, jsize, const jint *); /* 211 */
    void *unused_212[3];
    jint (*RegisterNatives)(JNIEnv *, jclass, const JNINativeMethod *, jint); /* 215 */
};

struct vm_functions {
    void *unused_0[6];
    jint (*GetEnv)(JavaVM *, void **, jint); /* 6 */
};

#endif

/* What the files of the binding share. */

#ifndef EDGE_JNI_SHARED_H
#define EDGE_JNI_SHARED_H

#include "constants.h"
#include "edge.h"
#include "jni.h"

enum { MAX_NAME = 32, MAX_PATH = 1024 }; /* bytes; longer paths are cut, and refused */

#define METHOD(name, signature, function) {(char *)name, (char *)signature, (void *)(uintptr_t)function}

extern const JNINativeMethod SENSES[], TOOLS[];
enum { SENSE_METHODS = 6, TOOL_METHODS = 4 };

jbyteArray jni_bytes(JNIEnv *env, const char *text, size_t length);

/* Zero for NULL. */
size_t jni_length(const char *text);

void jni_raise(JNIEnv *env, const edge_error *error);

/* At most `most` bytes, and a zero behind them. */
void jni_copy(JNIEnv *env, jbyteArray bytes, char *to, jsize most);

static inline edge_model *model_of(jlong handle) { return (edge_model *)(intptr_t)handle; }
static inline edge_session *session_of(jlong handle) { return (edge_session *)(intptr_t)handle; }

#endif

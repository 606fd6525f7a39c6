/* What reader.c calls of the CUDA driver, in memory of the CPU: a copy is made as late as it may be,
 * when something waits for it. FAKE_CUDA_FAILS: the number of the copy that fails, from 1. */

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *to;
    const char *from;
    size_t size;
} Copy;

typedef struct {
    Copy copies[1 << 16];
    int given, made;
} Stream;

typedef struct {
    Stream *stream;
    int given;
} Event;

static _Thread_local int has_context;
static atomic_int copies;

static void make(Stream *stream, int last) {
    for (; stream->made < last; stream->made++) {
        Copy *copy = &stream->copies[stream->made];
        memcpy(copy->to, copy->from, copy->size);
    }
}

int cuDeviceGet(int *device, int number) {
    *device = 100 + number;
    return number != 3; /* the only one here */
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &copies;
    return device != 103;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    return device != 103;
}

int cuCtxSetCurrent(void *context) {
    has_context = context == &copies;
    return has_context ? 0 : 201;
}

int cuStreamCreate(void **stream, unsigned flags) {
    *stream = calloc(1, sizeof(Stream));
    return has_context && flags == 1 && *stream ? 0 : 201;
}

int cuStreamSynchronize(void *stream) {
    make(stream, ((Stream *)stream)->given);
    return 0;
}

int cuStreamDestroy_v2(void *stream) {
    free(stream);
    return 0;
}

int cuEventCreate(void **event, unsigned flags) {
    *event = calloc(1, sizeof(Event));
    return has_context && flags == 2 && *event ? 0 : 201;
}

int cuEventRecord(void *event, void *stream) {
    *(Event *)event = (Event){stream, ((Stream *)stream)->given};
    return 0;
}

int cuEventSynchronize(void *event) {
    Event *found = event;
    if (found->stream) make(found->stream, found->given);
    return 0;
}

int cuEventDestroy_v2(void *event) {
    free(event);
    return 0;
}

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *to_stream) {
    const char *fails = getenv("FAKE_CUDA_FAILS");
    if (fails && atomic_fetch_add(&copies, 1) + 1 == atoi(fails)) return 719;
    Stream *stream = to_stream;
    stream->copies[stream->given++] = (Copy){(char *)to, from, size};
    return 0;
}

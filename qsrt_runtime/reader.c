/* Bytes of files to memory of a CPU or a CUDA device, by threads that need no interpreter's lock.
 *
 * reader.py compiles this and calls it. A thread reads parts into pinned buffers of its own and
 * starts their copies; it reads into a buffer again once the copy out of it has ended. The few
 * functions of the CUDA driver are found when it runs, so that no headers of it are needed.
 */

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { CUDA_FAILED = 1, SHORT_FILE, READ_FAILED }; /* failures */
const int32_t reader_cuda_failed = CUDA_FAILED, reader_short_file = SHORT_FILE;
enum { BUFFERS = 2 };
const int32_t reader_buffers = BUFFERS; /* of a thread */

/* Bytes [first, first + count) of rows of `size` bytes that begin in a file at start,
 * start + stride, ... and lie side by side at target. */
typedef struct {
    int32_t file;
    int64_t start, size, stride, first, count;
    char *target;
} Part;

typedef struct {
    void *library;
    void *context; /* the primary one of the device, as torch has it too */
    int device;
    int (*get_device)(int *, int);
    int (*retain_context)(void **, int);
    int (*release_context)(int);
    int (*set_context)(void *);
    int (*make_stream)(void **, unsigned);
    int (*end_stream)(void *);
    int (*await_stream)(void *);
    int (*make_event)(void **, unsigned);
    int (*end_event)(void *);
    int (*record_event)(void *, void *);
    int (*await_event)(void *);
    int (*copy)(uintptr_t, const void *, size_t, void *);
} Cuda;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Part *parts;
    int64_t given, taken, room; /* of parts */
    int is_complete, running;
    int failure, number, file; /* the first failure, errno or the driver's result, and whose file */
    char *memory; /* pinned, BUFFERS of part_size to a thread; NULL where targets are a CPU's */
    int64_t part_size;
    Cuda cuda;
    int thread_count;
    pthread_t threads[];
} Reader;

typedef struct {
    Reader *reader;
    int index;
} Worker;

/* Whether the driver is there, and a context of the device of this number. */
static int load_cuda(Cuda *cuda, int number) {
    cuda->library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda->library) return 0;
    struct {
        void *place;
        const char *name;
    } wanted[] = {
        {&cuda->get_device, "cuDeviceGet"},
        {&cuda->retain_context, "cuDevicePrimaryCtxRetain"},
        {&cuda->release_context, "cuDevicePrimaryCtxRelease_v2"},
        {&cuda->set_context, "cuCtxSetCurrent"},
        {&cuda->make_stream, "cuStreamCreate"},
        {&cuda->end_stream, "cuStreamDestroy_v2"},
        {&cuda->await_stream, "cuStreamSynchronize"},
        {&cuda->make_event, "cuEventCreate"},
        {&cuda->end_event, "cuEventDestroy_v2"},
        {&cuda->record_event, "cuEventRecord"},
        {&cuda->await_event, "cuEventSynchronize"},
        {&cuda->copy, "cuMemcpyHtoDAsync_v2"},
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
        *(void **)wanted[i].place = dlsym(cuda->library, wanted[i].name);
        if (!*(void **)wanted[i].place) return 0;
    }
    if (cuda->get_device(&cuda->device, number)) return 0;
    if (!cuda->retain_context(&cuda->context, cuda->device)) return 1;
    cuda->context = NULL;
    return 0;
}

/* Let go of a reader without threads. */
static void free_reader(Reader *reader) {
    if (reader->cuda.context) reader->cuda.release_context(reader->cuda.device);
    if (reader->cuda.library) dlclose(reader->cuda.library);
    pthread_cond_destroy(&reader->changed);
    pthread_mutex_destroy(&reader->lock);
    free(reader->parts);
    free(reader);
}

/* Note a failure, unless there was one, and drop what no thread has taken. */
static void fail(Reader *reader, int failure, int number, int file) {
    pthread_mutex_lock(&reader->lock);
    if (!reader->failure) {
        reader->failure = failure;
        reader->number = number;
        reader->file = file;
    }
    reader->taken = reader->given;
    pthread_mutex_unlock(&reader->lock);
}

/* The next part; 0 when there will be none. */
static int take(Reader *reader, Part *part) {
    pthread_mutex_lock(&reader->lock);
    while (reader->taken == reader->given && !reader->is_complete)
        pthread_cond_wait(&reader->changed, &reader->lock);
    int found = reader->taken < reader->given;
    if (found) *part = reader->parts[reader->taken++];
    pthread_mutex_unlock(&reader->lock);
    return found;
}

static int read_part(Reader *reader, const Part *part, char *to) {
    for (int64_t done = 0; done < part->count;) {
        int64_t at = part->first + done, column = at % part->size;
        int64_t size = part->size - column, left = part->count - done;
        if (size > left) size = left;
        int64_t from = part->start + at / part->size * part->stride + column;
        ssize_t count = pread(part->file, to + done, size, from);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            fail(reader, count ? READ_FAILED : SHORT_FILE, errno, part->file);
            return 0;
        }
        done += count;
    }
    return 1;
}

static void stage(Reader *reader, char *memory) {
    const Cuda *cuda = &reader->cuda;
    void *stream = NULL, *copied[BUFFERS] = {NULL};
    int result = cuda->set_context(cuda->context);
    if (!result) result = cuda->make_stream(&stream, 1); /* it waits for no other */
    for (int i = 0; i < BUFFERS && !result; i++)
        result = cuda->make_event(&copied[i], 2); /* without times */
    Part part;
    for (int turn = 0; !result && take(reader, &part); turn = (turn + 1) % BUFFERS) {
        char *buffer = memory + turn * reader->part_size;
        result = cuda->await_event(copied[turn]);
        if (result || !read_part(reader, &part, buffer)) break;
        result = cuda->copy((uintptr_t)part.target, buffer, part.count, stream);
        if (!result) result = cuda->record_event(copied[turn], stream);
    }
    if (stream) {
        int ended = cuda->await_stream(stream);
        if (!result) result = ended;
    }
    if (result) fail(reader, CUDA_FAILED, result, -1);
    for (int i = 0; i < BUFFERS; i++)
        if (copied[i]) cuda->end_event(copied[i]);
    if (stream) cuda->end_stream(stream);
}

static void *serve(void *argument) {
    Worker worker = *(Worker *)argument;
    Reader *reader = worker.reader;
    free(argument);
    Part part;
    if (reader->memory)
        stage(reader, reader->memory + worker.index * BUFFERS * reader->part_size);
    else
        while (take(reader, &part) && read_part(reader, &part, part.target)) continue;
    pthread_mutex_lock(&reader->lock);
    reader->running--;
    pthread_cond_broadcast(&reader->changed);
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}

/* A reader with its threads; NULL where there is no memory for one, no thread or no CUDA driver.
 *
 * memory: pinned, reader_buffers times part_size for each thread; NULL where targets are a CPU's.
 * device: number of the CUDA device that they are on otherwise. */
Reader *reader_start(int threads, int64_t part_size, char *memory, int device) {
    Reader *reader = calloc(1, sizeof(Reader) + threads * sizeof(pthread_t));
    if (!reader) return NULL;
    pthread_mutex_init(&reader->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&reader->changed, &clock);
    pthread_condattr_destroy(&clock);
    reader->memory = memory;
    reader->part_size = part_size;
    if (memory && !load_cuda(&reader->cuda, device)) {
        free_reader(reader);
        return NULL;
    }
    while (reader->thread_count < threads) {
        Worker *worker = malloc(sizeof(Worker));
        if (!worker) break;
        *worker = (Worker){reader, reader->thread_count};
        pthread_mutex_lock(&reader->lock);
        int failed = pthread_create(&reader->threads[reader->thread_count], NULL, serve, worker);
        if (!failed) reader->running++;
        pthread_mutex_unlock(&reader->lock);
        if (failed) {
            free(worker);
            break;
        }
        reader->thread_count++;
    }
    if (reader->thread_count) return reader;
    free_reader(reader);
    return NULL;
}

/* Have bytes read, in parts; 0 where there is no memory to note them. */
int reader_add(Reader *reader, const Part *whole) {
    int good = 1;
    pthread_mutex_lock(&reader->lock);
    for (int64_t done = 0; done < whole->count && good && !reader->failure;) {
        if (reader->given == reader->room) {
            int64_t room = reader->room ? 2 * reader->room : 256;
            Part *parts = realloc(reader->parts, room * sizeof(Part));
            good = parts != NULL;
            if (!good) break;
            reader->parts = parts;
            reader->room = room;
        }
        Part part = *whole;
        part.first += done;
        part.target += done;
        part.count -= done;
        if (part.count > reader->part_size) part.count = reader->part_size;
        reader->parts[reader->given++] = part;
        done += part.count;
    }
    pthread_cond_broadcast(&reader->changed);
    pthread_mutex_unlock(&reader->lock);
    return good;
}

/* Wait up to a tenth of a second until all is read; whether it is. Nothing is added from then on. */
int reader_wait(Reader *reader) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += 100000000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    pthread_mutex_lock(&reader->lock);
    reader->is_complete = 1;
    pthread_cond_broadcast(&reader->changed);
    int waited = 0;
    while (reader->running && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&reader->changed, &reader->lock, &end);
    int ended = !reader->running;
    pthread_mutex_unlock(&reader->lock);
    return ended;
}

/* Drop what no thread has taken, wait for the threads, and let go of all; [3]: failure, number and
 * file of the first failure, zeros where there was none. */
void reader_end(Reader *reader, int32_t *found) {
    pthread_mutex_lock(&reader->lock);
    reader->is_complete = 1;
    reader->taken = reader->given;
    pthread_cond_broadcast(&reader->changed);
    pthread_mutex_unlock(&reader->lock);
    for (int i = 0; i < reader->thread_count; i++) pthread_join(reader->threads[i], NULL);
    found[0] = reader->failure;
    found[1] = reader->number;
    found[2] = reader->file;
    free_reader(reader);
}

// What bench_load.py could reach without an interpreter: files in the page cache to a GPU.
//
//     nvcc -O2 -std=c++17 -o load_limit tests/bench/load_limit.cu && ./load_limit FILE...
//
// Threads read parts into pinned buffers of their own and start their copies; a buffer is read into
// again once its copy has ended. Prints medians, beside one copy of as many pinned bytes.

#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

constexpr int REPEATS = 7, THREADS = 30, BUFFERS = 3;
constexpr size_t PART = 8 << 20;  // at most

struct Part {
    int file;
    off_t start;
    size_t size;
    char* target;
};

struct Worker {
    cudaStream_t stream;
    cudaEvent_t copied[BUFFERS];
};

void check(bool good, const char* what) {
    if (!good) {
        std::fprintf(stderr, "%s failed\n", what);
        std::exit(1);
    }
}

double median_ms(const std::function<void()>& run) {
    run();
    std::vector<double> times;
    for (int i = 0; i < REPEATS; i++) {
        auto start = std::chrono::steady_clock::now();
        run();
        auto end = std::chrono::steady_clock::now();
        times.push_back(std::chrono::duration<double, std::milli>(end - start).count());
    }
    std::sort(times.begin(), times.end());
    return times[REPEATS / 2];
}

void read_whole(const Part& part, char* buffer) {
    for (size_t done = 0; done < part.size;) {
        ssize_t count = pread(part.file, buffer + done, part.size - done, part.start + done);
        check(count > 0, "pread");
        done += count;
    }
}

Worker make_worker() {
    Worker made;
    check(!cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    for (auto& event : made.copied)
        check(!cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return made;
}

void serve(const std::vector<Part>& parts, std::atomic<size_t>& next, char* memory, size_t size,
           int buffers, const Worker& worker) {
    for (int turn = 0;; turn = (turn + 1) % buffers) {
        size_t number = next++;
        if (number >= parts.size()) break;
        const Part& part = parts[number];
        char* buffer = memory + turn * size;
        check(!cudaEventSynchronize(worker.copied[turn]), "a copy");
        read_whole(part, buffer);
        auto kind = cudaMemcpyHostToDevice;
        check(!cudaMemcpyAsync(part.target, buffer, part.size, kind, worker.stream), "a copy");
        check(!cudaEventRecord(worker.copied[turn], worker.stream), "cudaEventRecord");
    }
    check(!cudaStreamSynchronize(worker.stream), "a copy");
}

int main(int count, char** names) {
    std::vector<std::pair<int, size_t>> files;
    size_t total = 0;
    for (int i = 1; i < count; i++) {
        int file = open(names[i], O_RDONLY);
        struct stat found;
        check(file >= 0 && !fstat(file, &found), names[i]);
        files.push_back({file, size_t(found.st_size)});
        total += found.st_size;
    }
    check(total > 0, "usage: load_limit FILE...: finding bytes");
    char *pinned, *device, *memory;
    check(!cudaMalloc(&device, total), "cudaMalloc");
    check(!cudaMallocHost(&pinned, total), "cudaMallocHost");
    check(!cudaMallocHost(&memory, THREADS * BUFFERS * PART), "cudaMallocHost");
    std::fill(pinned, pinned + total, 7);
    std::vector<Worker> workers(THREADS);
    for (auto& worker : workers) worker = make_worker();
    double plain =
        median_ms([&] { cudaMemcpy(device, pinned, total, cudaMemcpyHostToDevice); });
    std::printf("%.3f GB, plain copy %.1f ms\n", total / 1e9, plain);
    for (size_t size : {PART / 4, PART / 2, PART}) {
        std::vector<Part> parts;
        char* target = device;
        for (auto& [file, bytes] : files)
            for (size_t start = 0; start < bytes; start += size) {
                size_t taken = std::min(size, bytes - start);
                parts.push_back({file, off_t(start), taken, target});
                target += taken;
            }
        for (int threads : {8, 12, 16, 24, THREADS})
            for (int buffers = 1; buffers <= BUFFERS; buffers++) {
                double ms = median_ms([&] {
                    std::atomic<size_t> next{0};
                    std::vector<std::thread> all;
                    for (int t = 0; t < threads; t++)
                        all.emplace_back([&, t] {
                            char* own = memory + t * buffers * size;
                            serve(parts, next, own, size, buffers, workers[t]);
                        });
                    for (auto& thread : all) thread.join();
                });
                std::printf("parts of %zu MiB, %d threads, %d buffers each: %.1f ms, %.2f\n",
                            size >> 20, threads, buffers, ms, plain / ms);
            }
    }
}

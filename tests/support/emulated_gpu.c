/* The CUDA calls that need an answer, on a machine without a GPU; `emulated_gpu.py` makes stubs of all others.
 *
 * Device memory is the host's, copies are done when they are asked for, kernels are not run. EMULATED_GPU_HANG is
 * read at each wait of the host for the device: the seconds that it takes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "driver_types.h"

#define CALL int /* begins the line of each call that needs no stub; 0 is success */

enum { PAGE = 4096, PROCESSORS = 132 };
static const size_t ROOM = 1ul << 41;
static size_t CAPACITY = 80ul << 30; /* EMULATED_GPU_BYTES in its place, if that is set */

/* Memory: two ranges of addresses that are never used twice, so that an address tells its kind. A page before each
 * block holds its size. */
typedef struct { char *start; size_t taken; long used; } Range;
static Range device, pinned;
static __thread int current;

__attribute__((constructor)) static void reserve(void) {
    if (getenv("EMULATED_GPU_BYTES")) CAPACITY = strtoul(getenv("EMULATED_GPU_BYTES"), 0, 10);
    for (int i = 0; i < 2; i++)
        (i ? &pinned : &device)->start = mmap(0, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
static int take(Range *range, void **block, size_t bytes) {
    size_t whole = (bytes + 2 * PAGE - 1) / PAGE * PAGE, place = __sync_fetch_and_add(&range->taken, whole);
    *block = 0;
    if (range->start == MAP_FAILED || place + whole > ROOM) return cudaErrorMemoryAllocation;
    if (__sync_add_and_fetch(&range->used, whole) > (long)CAPACITY) {
        __sync_sub_and_fetch(&range->used, whole);
        return cudaErrorMemoryAllocation;
    }
    *(size_t *)(range->start + place) = whole;
    *block = range->start + place + PAGE;
    return 0;
}
static int give(Range *range, char *block) {
    if (!block) return 0;
    size_t whole = *(size_t *)(block - PAGE);
    __sync_sub_and_fetch(&range->used, whole);
    return madvise(block - PAGE, whole, MADV_DONTNEED) ? cudaErrorInvalidValue : 0;
}
static int holds(Range *range, const char *place) { return place >= range->start && place < range->start + ROOM; }

CALL cudaMalloc(void **block, size_t bytes) { return take(&device, block, bytes); }
CALL cudaFree(void *block) { return give(&device, block); }
CALL cudaHostAlloc(void **block, size_t bytes, unsigned flags) { return take(&pinned, block, bytes); }
CALL cudaFreeHost(void *block) { return give(&pinned, block); }
CALL cudaMemGetInfo(size_t *unused, size_t *total) { *total = CAPACITY; *unused = CAPACITY - device.used; return 0; }
CALL cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *place) {
    memset(found, 0, sizeof *found);
    found->type = holds(&device, place) ? cudaMemoryTypeDevice : holds(&pinned, place) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = found->type == cudaMemoryTypeUnregistered ? -2 : 0;
    found->hostPointer = found->devicePointer = (void *)place;
    return 0;
}
CALL cudaGetSymbolAddress(void **place, const void *symbol) { static char any[1 << 22]; *place = any; return 0; }
CALL cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { memmove(to, from, bytes); return 0; }
CALL cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { memmove(to, from, bytes); return 0; }
CALL cudaMemcpy2DAsync(char *to, size_t to_pitch, char *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
    for (size_t row = 0; row < height; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
    return 0;
}
CALL cudaMemset(void *to, int value, size_t bytes) { memset(to, value, bytes); return 0; }
CALL cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { memset(to, value, bytes); return 0; }

/* The device: one, with an H100's limits. */
CALL cudaGetDeviceCount(int *count) { *count = 1; return 0; }
CALL cudaGetDevice(int *index) { *index = current; return 0; }
CALL cudaSetDevice(int index) { current = index; return 0; }
CALL cudaGetDeviceProperties(struct cudaDeviceProp *its, int index) {
    memset(its, 0, sizeof *its);
    strcpy(its->name, "emulated GPU");
    its->totalGlobalMem = CAPACITY;
    its->major = 9;
    its->multiProcessorCount = PROCESSORS;
    its->warpSize = 32;
    its->maxThreadsPerBlock = its->maxThreadsDim[0] = its->maxThreadsDim[1] = 1024;
    its->maxThreadsDim[2] = 64;
    its->maxGridSize[0] = INT32_MAX;
    its->maxGridSize[1] = its->maxGridSize[2] = 65535;
    its->maxThreadsPerMultiProcessor = 2048;
    its->maxBlocksPerMultiProcessor = 32;
    its->regsPerBlock = its->regsPerMultiprocessor = 65536;
    its->sharedMemPerBlock = 48 << 10;
    its->sharedMemPerBlockOptin = 227 << 10;
    its->sharedMemPerMultiprocessor = 228 << 10;
    its->l2CacheSize = 50 << 20;
    its->memoryBusWidth = 5120;
    its->textureAlignment = 512;
    its->concurrentKernels = its->unifiedAddressing = its->canMapHostMemory = 1;
    return 0;
}
CALL cudaGetDeviceProperties_v2(struct cudaDeviceProp *its, int index) { return cudaGetDeviceProperties(its, index); }
CALL cudaDeviceGetAttribute(int *value, int which, int index) {
    struct cudaDeviceProp its;
    cudaGetDeviceProperties(&its, index);
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *value = its.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = its.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = its.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = its.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = its.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *value = its.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = its.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = its.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = its.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = its.regsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = its.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = its.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = its.sharedMemPerMultiprocessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = its.major; break;
    case cudaDevAttrL2CacheSize: *value = its.l2CacheSize; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
    }
    return 0;
}
CALL cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
CALL cudaDeviceGetPCIBusId(char *text, int length, int index) { snprintf(text, length, "0000:00:00.0"); return 0; }
CALL cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
CALL cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
CALL cudaFuncGetAttributes(struct cudaFuncAttributes *its, const void *kernel) {
    memset(its, 0, sizeof *its);
    its->ptxVersion = its->binaryVersion = 90;
    its->maxThreadsPerBlock = 1024;
    its->numRegs = 32;
    its->maxDynamicSharedSizeBytes = 48 << 10;
    return 0;
}
CALL cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int block, size_t shared) { *count = 8; return 0; }
CALL cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int block, size_t shared, unsigned flags) {
    *count = 8;
    return 0;
}

/* Streams and events: a handle each, and the host's time. */
static int handle(void **made) { static long last = 256; *made = (void *)__sync_add_and_fetch(&last, 16); return 0; }
static int wait_for_device(void) {
    char *seconds = getenv("EMULATED_GPU_HANG");
    for (time_t end = time(0) + (seconds ? atoi(seconds) : 0); time(0) < end;) usleep(10000);
    return 0;
}
CALL cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return handle(stream); }
CALL cudaStreamCreateWithFlags(void **stream, unsigned flags) { return handle(stream); }
CALL cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
CALL cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
CALL cudaStreamGetCaptureInfo_v2(void *stream, int *status) { *status = 0; return 0; }
CALL cudaStreamGetCaptureInfo_v3(void *stream, int *status) { *status = 0; return 0; }
CALL cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
CALL cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) { call(data); return 0; }
CALL cudaStreamSynchronize(void *stream) { return wait_for_device(); }
CALL cudaDeviceSynchronize(void) { return wait_for_device(); }
CALL cudaEventSynchronize(void *event) { return wait_for_device(); }
CALL cudaEventCreateWithFlags(void **event, unsigned flags) { *event = calloc(1, sizeof(struct timespec)); return 0; }
CALL cudaEventDestroy(void *event) { free(event); return 0; }
CALL cudaEventRecord(void *event, void *stream) { return clock_gettime(CLOCK_MONOTONIC, event); }
CALL cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return clock_gettime(CLOCK_MONOTONIC, event); }
CALL cudaEventElapsedTime(float *ms, struct timespec *from, struct timespec *to) {
    *ms = (to->tv_sec - from->tv_sec) * 1e3 + (to->tv_nsec - from->tv_nsec) * 1e-6;
    return 0;
}
CALL cudaEventElapsedTime_v2(float *ms, struct timespec *from, struct timespec *to) { return cudaEventElapsedTime(ms, from, to); }

/* The driver, whose functions torch asks for by name, and cuBLAS. */
CALL cuCtxGetCurrent(void **context) { *context = (void *)8; return 0; }
CALL cuDevicePrimaryCtxGetState(int index, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
static int succeed(void) { return 0; }
CALL cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *found) {
    *function = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)succeed : (void *)cuDevicePrimaryCtxGetState;
    if (found) *found = 0;
    return 0;
}
CALL cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, found);
}
CALL cublasCreate_v2(void **made) { return handle(made); }
CALL cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
CALL cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
CALL cublasLtMatmulDescCreate(void **made, int compute, int scale) { return handle(made); }
CALL cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) { return handle(made); }
CALL cublasLtMatmulPreferenceCreate(void **made) { return handle(made); }
CALL cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *op, void *a, void *b, void *c, void *d, void *preference, int wanted, void *result, int *count
) {
    *count = 1;
    return 0;
}

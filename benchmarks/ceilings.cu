/* What the chip can do at best: rates of its product instructions with their operands already in registers or shared
 * memory, the time of a launch that only reads, an empty launch, and what a launch costs the host. Compiled on demand
 * by ceilings.py into a library that it calls; the instructions are those of kernels/ptx. */
#include <cuda.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "ptx/cvta.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#define TRY(call)                    \
    do {                             \
        cudaError_t error_ = (call); \
        if (error_ != cudaSuccess)   \
            return error_;           \
    } while (0)

enum what { MMA_SYNC, WGMMA, FMA };
enum dtype { BFLOAT16, FLOAT16, FLOAT32 };

/* ---- random data: zeros, or any constant, take less power to multiply and to move -------------------------------- */

static __device__ __forceinline__ uint32_t hash(uint64_t x) {
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
    return static_cast<uint32_t>(x >> 32);
}

static __device__ __forceinline__ float normal(uint64_t seed) {
    float u = (hash(2 * seed) + 1.0f) * 0x1p-32f, v = hash(2 * seed + 1) * 0x1p-32f;
    return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

template <class T> static __global__ void fill_normal(T *data, size_t count) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<size_t>(gridDim.x) * blockDim.x)
        data[i] = from_float<T>(normal(i));
}

static __global__ void fill_bits(uint4 *data, size_t count) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<size_t>(gridDim.x) * blockDim.x)
        data[i] = make_uint4(hash(4 * i), hash(4 * i + 1), hash(4 * i + 2), hash(4 * i + 3));
}

/* ---- rates ------------------------------------------------------------------------------------------------------- */

static const size_t SOURCE_BYTES = 1 << 20;
static const int TILES = 4;  /* of 16 rows, and of 8 columns, that a warp of `rate_mma_sync` holds */
static const int FMAS = 8;   /* chains of a thread of `rate_fma`, and their steps an iteration */
static const int STAGES = 4; /* of shared memory that `rate_wgmma` goes through */
static const int A_BYTES = 64 * 64 * 2, B_BYTES = 256 * 64 * 2; /* of one warpgroup, of both */
static const int STAGE_BYTES = 2 * A_BYTES + B_BYTES;

/* A sum that no data gives, so that the compiler must compute it. */
static __device__ __forceinline__ void keep(float sum, float *out) {
    if (sum == 1.2345e-30f)
        *out = sum;
}

/* TILES x TILES independent m16n8k16 products an iteration and warp, in registers. */
template <class T> static __global__ void __launch_bounds__(512)
    rate_mma_sync(const uint32_t *source, float *out, int iterations) {
    uint32_t a[TILES][4], b[TILES][2];
    float d[TILES][TILES][4] = {};
    const uint32_t *mine = source + (threadIdx.x * 24 + blockIdx.x * 64) % 65536;
    for (int i = 0; i < TILES; i++) {
        for (int r = 0; r < 4; r++)
            a[i][r] = mine[i * 4 + r];
        for (int r = 0; r < 2; r++)
            b[i][r] = mine[TILES * 4 + i * 2 + r];
    }
    for (int n = 0; n < iterations; n++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
                mma_m16n8k16(T{}, d[i][j], a[i], b[j][0], b[j][1]);
    float sum = 0;
    for (int i = 0; i < TILES; i++)
        for (int j = 0; j < TILES; j++)
            for (int r = 0; r < 4; r++)
                sum += d[i][j][r];
    keep(sum, out);
}

/* Two warpgroups, each 64 x 256 x 64 an iteration from shared memory, one group of products kept in flight. */
template <bool IS_BF16> static __global__ void __launch_bounds__(256, 1)
    rate_wgmma(const uint4 *source, float *out, int iterations) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t smem[];
    uint4 *chunks = reinterpret_cast<uint4 *>(smem);
    for (int i = threadIdx.x; i < STAGES * STAGE_BYTES / 16; i += blockDim.x)
        chunks[i] = source[(i + blockIdx.x * 97) % (SOURCE_BYTES / 16)];
    fence_proxy_async();
    __syncthreads();
    float d[128];
    for (int i = 0; i < 128; i++)
        d[i] = 0;
    uint32_t base = cvta_to_shared(smem), own_a = threadIdx.x / 128 * A_BYTES;
    for (int n = 0; n < iterations; n++) {
        uint32_t stage = base + n % STAGES * STAGE_BYTES;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) /* 16 columns are 32 bytes of a 128-byte swizzled row; 8 rows are 1024 bytes */
            wgmma<256, IS_BF16, 0, 0>::mma_async(d, wgmma_descriptor<128>(stage + own_a + k * 32, 16, 1024),
                                                 wgmma_descriptor<128>(stage + 2 * A_BYTES + k * 32, 16, 1024), 1);
        wgmma_commit_group();
        wgmma_wait_group<1>();
    }
    wgmma_wait_group<0>();
    float sum = 0;
    for (int i = 0; i < 128; i++)
        sum += d[i];
    keep(sum, out);
#endif
}

/* FMAS chains of dependent fused multiply-adds a thread, FMAS steps an iteration, in registers. All chains share their two
 * other operands, which the operand cache keeps: with operands of their own, register banks would collide and the loop would
 * measure those. */
static __global__ void __launch_bounds__(512) rate_fma(const float *source, float *out, int iterations) {
    const float *mine = source + (threadIdx.x * 16 + blockIdx.x * 64) % 65536;
    const float a = mine[0] * 0.1f, b = mine[1]; /* a sum stays finite */
    float d[FMAS];
    for (int i = 0; i < FMAS; i++)
        d[i] = mine[2 + i];
    for (int n = 0; n < iterations; n++)
#pragma unroll
        for (int step = 0; step < FMAS; step++)
#pragma unroll
            for (int i = 0; i < FMAS; i++)
                d[i] = __fmaf_rn(d[i], a, b);
    float sum = 0;
    for (int i = 0; i < FMAS; i++)
        sum += d[i];
    keep(sum, out);
}

static int sm_count() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

/* `launches` kernels back to back, one block of `warps` warps an SM: the time of each in ms[], the floating-point
 * operations of one in *flops. wgmma: 8 warps. */
extern "C" int tcg_rate(int what, int dtype, int warps, int iterations, int launches, float *ms, double *flops) {
    int sms = sm_count();
    void *source = NULL;
    float *out = NULL;
    TRY(cudaMalloc(&source, SOURCE_BYTES + 4096));
    TRY(cudaMalloc(&out, sizeof *out));
    size_t items = (SOURCE_BYTES + 4096) / (dtype == FLOAT32 ? 4 : 2);
    if (dtype == BFLOAT16)
        fill_normal<<<sms, 256>>>(static_cast<bf16 *>(source), items);
    if (dtype == FLOAT16)
        fill_normal<<<sms, 256>>>(static_cast<f16 *>(source), items);
    if (dtype == FLOAT32)
        fill_normal<<<sms, 256>>>(static_cast<f32 *>(source), items);
    TRY(cudaGetLastError());
    const uint32_t *words = static_cast<uint32_t *>(source);
    const uint4 *chunks = static_cast<uint4 *>(source);
    TRY(cudaFuncSetAttribute(rate_wgmma<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * STAGE_BYTES));
    TRY(cudaFuncSetAttribute(rate_wgmma<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * STAGE_BYTES));
    std::vector<cudaEvent_t> events(launches + 1);
    for (cudaEvent_t &event : events)
        TRY(cudaEventCreate(&event));
    TRY(cudaEventRecord(events[0]));
    for (int i = 0; i < launches; i++) {
        if (what == FMA)
            rate_fma<<<sms, warps * 32>>>(static_cast<float *>(source), out, iterations);
        else if (what == WGMMA && dtype == BFLOAT16)
            rate_wgmma<true><<<sms, 256, STAGES * STAGE_BYTES>>>(chunks, out, iterations);
        else if (what == WGMMA)
            rate_wgmma<false><<<sms, 256, STAGES * STAGE_BYTES>>>(chunks, out, iterations);
        else if (dtype == BFLOAT16)
            rate_mma_sync<bf16><<<sms, warps * 32>>>(words, out, iterations);
        else
            rate_mma_sync<f16><<<sms, warps * 32>>>(words, out, iterations);
        TRY(cudaGetLastError());
        TRY(cudaEventRecord(events[i + 1]));
    }
    TRY(cudaDeviceSynchronize());
    for (int i = 0; i < launches; i++)
        TRY(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
    for (cudaEvent_t event : events)
        TRY(cudaEventDestroy(event));
    double products = what == FMA     ? FMAS * FMAS * 32.0 * warps
                      : what == WGMMA ? 2 * 64 * 256 * 64.0
                                      : TILES * TILES * 16 * 8 * 16.0 * warps;
    *flops = 2 * products * iterations * sms;
    TRY(cudaFree(source));
    return cudaFree(out);
}

/* ---- memory and launches ----------------------------------------------------------------------------------------- */

static const int WIDE = 4; /* loads in flight a thread */

/* Reads `count` chunks of 16 bytes. */
static __global__ void __launch_bounds__(512) read_chunks(const uint4 *data, size_t count, uint32_t *out) {
    size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    uint32_t mixed = 0;
    for (; i + (WIDE - 1) * stride < count; i += WIDE * stride) {
        uint4 chunk[WIDE];
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            chunk[j] = __ldcs(data + i + j * stride);
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            mixed ^= chunk[j].x ^ chunk[j].y ^ chunk[j].z ^ chunk[j].w;
    }
    for (; i < count; i += stride)
        mixed ^= __ldcs(data + i).x;
    if (mixed == 0x9e3779b9u)
        *out = mixed;
}

static __global__ void empty() {}

/* The median over `rounds` replays of a graph of `launches` calls launch(i), microseconds a launch. Each replay follows
 * an untimed one, which hides the cost of starting it. */
template <class Launch> static cudaError_t replay(Launch launch, int launches, int rounds, float *us) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replayed;
    cudaEvent_t before, after;
    TRY(cudaStreamCreate(&stream));
    TRY(cudaEventCreate(&before));
    TRY(cudaEventCreate(&after));
    TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; i++)
        launch(i, stream);
    TRY(cudaStreamEndCapture(stream, &graph));
    TRY(cudaGraphInstantiate(&replayed, graph, 0));
    std::vector<float> times(rounds);
    for (float &time : times) {
        TRY(cudaGraphLaunch(replayed, stream));
        TRY(cudaEventRecord(before, stream));
        TRY(cudaGraphLaunch(replayed, stream));
        TRY(cudaEventRecord(after, stream));
        TRY(cudaEventSynchronize(after));
        TRY(cudaEventElapsedTime(&time, before, after));
    }
    std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
    *us = times[rounds / 2] * 1e3f / launches;
    TRY(cudaGraphExecDestroy(replayed));
    TRY(cudaGraphDestroy(graph));
    TRY(cudaEventDestroy(before));
    TRY(cudaEventDestroy(after));
    return cudaStreamDestroy(stream);
}

static uint4 *pool;
static size_t pool_bytes;
static const size_t POOL_BYTES = static_cast<size_t>(4) << 30;
static const int SLOTS_MAX = 64;

extern "C" int tcg_release() {
    cudaError_t error = cudaFree(pool);
    pool = NULL;
    pool_bytes = 0;
    return error;
}

/* The time of one launch that reads `bytes`, each launch another part of a pool larger than any L2. */
extern "C" int tcg_read(size_t bytes, int blocks_per_sm, int launches, int rounds, float *us) {
    int sms = sm_count();
    if (!pool) {
        size_t free_bytes = 0, total_bytes = 0;
        TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
        pool_bytes = std::min(POOL_BYTES, free_bytes / 2 / 4096 * 4096);
        TRY(cudaMalloc(&pool, pool_bytes));
        fill_bits<<<8 * sms, 256>>>(pool, pool_bytes / 16);
        TRY(cudaGetLastError());
        TRY(cudaDeviceSynchronize());
    }
    size_t count = (bytes + 15) / 16, slot = (count + 255) / 256 * 256;
    int slots = static_cast<int>(std::min<size_t>(SLOTS_MAX, pool_bytes / 16 / slot));
    if (!slots)
        return cudaErrorMemoryAllocation;
    return replay(
        [=](int i, cudaStream_t stream) {
            const uint4 *data = pool + i % slots * slot;
            uint32_t *nowhere = reinterpret_cast<uint32_t *>(pool);
            read_chunks<<<sms * blocks_per_sm, 512, 0, stream>>>(data, count, nowhere);
        },
        launches, rounds, us);
}

extern "C" int tcg_empty(int launches, int rounds, float *us) {
    int sms = sm_count();
    return replay([=](int, cudaStream_t stream) { empty<<<sms, 128, 0, stream>>>(); }, launches, rounds, us);
}

struct arguments {
    uint8_t bytes[512]; /* about what a product with three tensor maps is given */
};

static __global__ void take(const __grid_constant__ arguments) {}

/* Host time of one cuLaunchKernelEx, microseconds, over `calls` back to back on the legacy default stream. */
extern "C" int tcg_launch_cost(int calls, double *us) {
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    TRY(cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &entry, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess)
        return cudaErrorSymbolNotFound;
    CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **) = NULL;
    launch = reinterpret_cast<decltype(launch)>(entry);
    cudaFunction_t function;
    TRY(cudaGetFuncBySymbol(&function, reinterpret_cast<const void *>(take)));
    arguments given = {};
    void *parameters[] = {&given};
    CUlaunchConfig config = {};
    config.gridDimX = config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 128;
    config.blockDimY = config.blockDimZ = 1;
    TRY(cudaDeviceSynchronize());
    CUresult result = CUDA_SUCCESS;
    auto started = std::chrono::steady_clock::now();
    for (int i = 0; i < calls && result == CUDA_SUCCESS; i++)
        result = launch(&config, function, parameters, NULL);
    std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - started;
    if (result != CUDA_SUCCESS)
        return cudaErrorLaunchFailure;
    *us = elapsed.count() / calls;
    return cudaDeviceSynchronize();
}

extern "C" const char *tcg_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

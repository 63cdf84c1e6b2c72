// The product's host side: tensor maps, the instantiation that serves a launch, and the plain C entry points.
#include "gemm.cuh"

namespace w12 {

using Encode = decltype(&cuTensorMapEncodeTiled);

constexpr int kMaxDevices = 64;  // that are remembered; on one beyond, each launch asks anew

Encode encoder() {  // from the driver that is loaded, so that the library links to none
  static Encode found = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(pointer) : nullptr;
  }();
  return found;
}

bool make_maps(const Arguments& p, int tokens, Maps* maps) {
  const Encode encode = encoder();
  if (!encode) return false;
  const cuuint32_t ones[4] = {1, 1, 1, 1};
  const cuuint32_t words = p.subtile_bytes / 8, stage = p.stage_subtiles;  // words: at most 256, the limit of a box
  const cuuint64_t split = p.split, shared_out = p.subtiles / p.split, bytes = p.subtile_bytes;
  const cuuint64_t sizes[4] = {words, split, shared_out, cuuint64_t(p.row_tiles)};
  const cuuint64_t strides[3] = {bytes, split * bytes, p.subtiles * bytes};
  const cuuint32_t box[4] = {words, 1, stage, cuuint32_t(p.width)};
  CUresult first = encode(&maps->weight, CU_TENSOR_MAP_DATA_TYPE_UINT64, 4, const_cast<uint8_t*>(p.weight), sizes,
                          strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  const cuuint64_t x_sizes[4] = {kColumns, cuuint64_t(p.m), split, shared_out};
  const cuuint64_t x_strides[3] = {cuuint64_t(p.ldx) * 2, kColumns * 2, split * kColumns * 2};
  const cuuint32_t x_box[4] = {kColumns, cuuint32_t(tokens), 1, stage};
  CUresult second = encode(&maps->x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<__nv_bfloat16*>(p.x), x_sizes,
                           x_strides, x_box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return first == CUDA_SUCCESS && second == CUDA_SUCCESS;
}

template <int FORMAT, int NT, int MANNER, int EPILOGUE>
cudaError_t launch(const Arguments& p, int groups, cudaStream_t stream) {
  auto kernel = gemm<FORMAT, NT, MANNER, EPILOGUE>;
  const int consumers = row_warps_of(p.width, MANNER) * p.depth;
  if ((consumers + 1) * 32 > max_threads(NT, MANNER) || p.stages > kMaxStages) return cudaErrorInvalidConfiguration;
  Maps maps;
  if (!make_maps(p, NT * 8, &maps)) return cudaErrorNotSupported;
  size_t bytes = kAlign + static_cast<size_t>(p.stages) * (weight_stage_bytes(p) +
                                                  x_stage_bytes(p.stage_subtiles, NT * 8)) +
                 consumers * kPatchBytes;
  if (EPILOGUE == kBest) bytes += NT * 8 * ((p.width * kRows + 8) * 2 + kTop * 8);
  const size_t reduction =
      p.split * p.depth > 1 ? kAlign + static_cast<size_t>(p.depth) * p.width * kRows * NT * 8 * 4 : 0;
  if (reduction > bytes) bytes = reduction;
  static size_t allowed[kMaxDevices] = {};  // per instantiation and device; raising it twice is harmless
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kMaxDevices || bytes > allowed[device]) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices) allowed[device] = bytes;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(groups * p.split);
  config.blockDim = dim3((consumers + 1) * 32);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (p.split > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = p.split;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (p.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <int FORMAT, int EPILOGUE>
cudaError_t choose(const Arguments& p, int manner, int groups, cudaStream_t stream) {
  const int nt = (p.m + 7) / 8;
#ifdef W12_WGMMA
#define W12_GROUPED_CASE(NT) \
  if (manner == kGrouped) return launch<FORMAT, NT, kGrouped, EPILOGUE>(p, groups, stream);
#else
#define W12_GROUPED_CASE(NT) \
  if (manner == kGrouped) return cudaErrorNotSupported;
#endif
#define W12_CASE(limit, NT)                                                     \
  if (nt <= limit) {                                                            \
    W12_GROUPED_CASE(NT)                                                        \
    return manner == kTwo ? launch<FORMAT, NT, kTwo, EPILOGUE>(p, groups, stream) \
                          : launch<FORMAT, NT, kOne, EPILOGUE>(p, groups, stream); \
  }
  W12_CASE(1, 1) W12_CASE(2, 2) W12_CASE(4, 4) W12_CASE(8, 8)
#undef W12_CASE
#undef W12_GROUPED_CASE
  return cudaErrorInvalidValue;
}

// The best of the blocks' candidates: value [m, top] as BF16 rounded it, index [m, top].
__global__ void finish_best(const float* value, const int* index, float* out_value, int64_t* out_index, int blocks, int m,
                            int top) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int token = blockIdx.x, lane = threadIdx.x;
  TopList list;
  for (int i = lane; i - lane < blocks * kTop; i += 32) {
    const int at = (i / kTop * m + token) * kTop + i % kTop;
    const bool there = i < blocks * kTop && i % kTop < top;
    list.offer(there ? value[at] : -INFINITY, there ? index[at] : kNoIndex, top, lane);
  }
  if (lane < top) out_index[token * top + lane] = list.index;
  if (lane < top && out_value) out_value[token * top + lane] = list.value;
}

}  // namespace w12

extern "C" const char* w12_gemm(const w12::Arguments* p, int format, int epilogue, int manner, int groups, void* stream) {
  using namespace w12;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaErrorInvalidValue;
  if (format == kW12 && epilogue == kStore) error = choose<kW12, kStore>(*p, manner, groups, s);
  if (format == kW12 && epilogue == kSilu) error = choose<kW12, kSilu>(*p, manner, groups, s);
  if (format == kW12 && epilogue == kBest) error = choose<kW12, kBest>(*p, manner, groups, s);
  if (format == kBf16 && epilogue == kStore) error = choose<kBf16, kStore>(*p, manner, groups, s);
  if (format == kBf16 && epilogue == kSilu) error = choose<kBf16, kSilu>(*p, manner, groups, s);
  if (format == kBf16 && epilogue == kBest) error = choose<kBf16, kBest>(*p, manner, groups, s);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" const char* w12_finish_best(const float* value, const int* index, float* out_value, int64_t* out_index,
                                       int blocks, int m, int top, int dependent, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(m);
  config.blockDim = dim3(32);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, w12::finish_best, value, index, out_value, out_index, blocks, m, top);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

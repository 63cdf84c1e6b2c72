// In which order logits are: higher ones first, equal ones by index, NaN before every number, as torch.argmax and sort have it.
#pragma once

namespace w12 {

__device__ __forceinline__ bool better(float v, int i, float w, int j) {
  const bool v_nan = v != v, w_nan = w != w;
  if (v_nan != w_nan) return v_nan;
  return v > w || ((v == w || v_nan) && i < j);
}

}  // namespace w12

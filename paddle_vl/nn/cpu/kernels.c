/* Kernels for the CPU in float32: rotary embedding, attention, norms, dropout, GELU's tanh form,
 * gated units, the operations of a gated DeltaNet layer, experts.
 *
 * Compiled by paddle_vl/nn/cpu/compiler.py where a C compiler is found, and called through ctypes on
 * the data of contiguous tensors. They need no header of Paddle. OpenMP and the matrix product come
 * from the libraries of Paddle's wheel (libiomp5.so, libmklml_intel.so): a second OpenMP runtime in
 * the process gives wrong results without an error.
 *
 * Loops over rows are static, and every task of attention writes rows of its own, so results depend
 * on the number of threads only.
 *
 * Letters: N rows, C channels, H width of a head, Q query heads, K key heads, T threads.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

int omp_get_max_threads(void);
int omp_get_thread_num(void);
void cblas_sgemm(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
void cblas_strsm(int layout, int side, int triangle, int trans_a, int diagonal, int m, int n,
                 float alpha, const float *a, int lda, float *b, int ldb);
enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112, LOWER = 122, UNIT = 132, LEFT = 141 };

/* exp(x) to about one unit in the last place; 0 below -87.3 and the largest power above 88.
 * Source: expf of the Cephes library (S. Moshier). */
static inline float fast_exp(float x) {
  float kept = x < -87.3f ? -87.3f : (x > 88.0f ? 88.0f : x);
  float n = __builtin_rintf(kept * 1.44269504088896341f);
  float r = kept - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  union { int32_t i; float f; } power;
  power.i = ((int32_t)n + 127) << 23;
  float y = p * power.f;
  y = x < -87.3f ? 0.0f : y;
  /* A comparison with NaN is false, so NaN came through the limits as it is; infinity did not. */
  return x > 88.0f ? x * 1.7e38f : y;
}

/* ---- activations: x * s(x), with s a sigmoid ---- */

/* s and the slope of x s, of SiLU or of GELU's tanh form: s = 1 / (1 + exp(-u(x))), where u is x or
 * 2 sqrt(2 / pi) (x + 0.044715 x^3). */
static inline __attribute__((always_inline)) float sigmoid_of(float x, int is_gelu, float *slope) {
  float u = is_gelu ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
  float du = is_gelu ? 1.5957691216057308f * (1.0f + 0.134145f * x * x) : 1.0f;
  float s = 1.0f / (1.0f + fast_exp(-u));
  *slope = s + x * (s * (1.0f - s)) * du;
  return s;
}

static inline __attribute__((always_inline)) void gated_row(const float *gate, const float *up,
                                                            float *y, i64 columns, int is_gelu) {
#pragma omp simd
  for (i64 j = 0; j < columns; j++) {
    float slope;
    y[j] = gate[j] * sigmoid_of(gate[j], is_gelu, &slope) * up[j];
  }
}

static inline __attribute__((always_inline)) void gated_row_slopes(
    const float *gate, const float *up, const float *grad, float *grad_gate, float *grad_up,
    i64 columns, int is_gelu) {
#pragma omp simd
  for (i64 j = 0; j < columns; j++) {
    float slope, s = sigmoid_of(gate[j], is_gelu, &slope);
    grad_up[j] = grad[j] * gate[j] * s;
    grad_gate[j] = grad[j] * up[j] * slope;
  }
}

/* silu(gate) * up or gelu(gate) * up; rows may have a stride, for two halves of one matrix. Each call
 * of a row function has a constant form, so that no loop branches. */
void gated_forward(const float *gate, const float *up, float *y, i64 rows, i64 columns, i64 stride,
                   int is_gelu) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < rows; i++) {
    const float *a = gate + i * stride, *b = up + i * stride;
    if (is_gelu) gated_row(a, b, y + i * columns, columns, 1);
    else gated_row(a, b, y + i * columns, columns, 0);
  }
}

void gated_backward(const float *gate, const float *up, const float *grad, float *grad_gate,
                    float *grad_up, i64 rows, i64 columns, i64 stride, int is_gelu) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < rows; i++) {
    const float *a = gate + i * stride, *b = up + i * stride, *g = grad + i * columns;
    float *ga = grad_gate + i * stride, *gb = grad_up + i * stride;
    if (is_gelu) gated_row_slopes(a, b, g, ga, gb, columns, 1);
    else gated_row_slopes(a, b, g, ga, gb, columns, 0);
  }
}

void gelu_tanh_forward(const float *x, float *y, i64 n) {
#pragma omp parallel for simd schedule(static)
  for (i64 i = 0; i < n; i++) {
    float slope;
    y[i] = x[i] * sigmoid_of(x[i], 1, &slope);
  }
}

void gelu_tanh_backward(const float *x, const float *grad, float *grad_x, i64 n) {
#pragma omp parallel for simd schedule(static)
  for (i64 i = 0; i < n; i++) {
    float slope;
    sigmoid_of(x[i], 1, &slope);
    grad_x[i] = grad[i] * slope;
  }
}

/* ---- dropout ---- */

static inline uint64_t sfc64(uint64_t s[4]) {
  uint64_t drawn = s[0] + s[1] + s[3]++;
  s[0] = s[1] ^ (s[1] >> 11);
  s[1] = s[2] + (s[2] << 3);
  s[2] = ((s[2] << 24) | (s[2] >> 40)) + drawn;
  return drawn;
}

/* Draws as paddle_vl/nn/cpu/kernels.py does: a byte for each entry, eight in each draw; and for each
 * that equals `first`, in their order, a draw whose lowest three bytes are compared with `rest`. */
void dropout_forward(const float *x, float *y, uint8_t *kept, i64 n, uint64_t word0, uint64_t word1,
                     uint64_t word2, i64 mixing, int first, uint64_t rest, float factor) {
  uint64_t state[4] = {word0, word1, word2, 1};
  for (i64 i = 0; i < mixing; i++) sfc64(state);
  for (i64 i = 0; i < n; i += 8) {
    uint64_t drawn = sfc64(state);
    memcpy(kept + i, &drawn, n - i < 8 ? n - i : 8);
  }
  for (i64 begin = 0; begin < n; begin += 64) {
    uint8_t *bytes = kept + begin;
    i64 count = n - begin < 64 ? n - begin : 64;
    int num_ties = 0;
#pragma omp simd reduction(+ : num_ties)
    for (i64 i = 0; i < count; i++) num_ties += bytes[i] == first;
    if (num_ties) {
      for (i64 i = 0; i < count; i++)
        bytes[i] = bytes[i] == first ? (sfc64(state) & 0xFFFFFF) >= rest : bytes[i] > first;
    } else {
#pragma omp simd
      for (i64 i = 0; i < count; i++) bytes[i] = bytes[i] > first;
    }
  }
#pragma omp parallel for simd schedule(static)
  for (i64 i = 0; i < n; i++) y[i] = x[i] * (kept[i] ? factor : 0.0f);
}

void dropout_backward(const float *grad, const uint8_t *kept, float *grad_x, i64 n, float factor) {
#pragma omp parallel for simd schedule(static)
  for (i64 i = 0; i < n; i++) grad_x[i] = grad[i] * (kept[i] ? factor : 0.0f);
}

/* ---- rotary embedding ---- */

/* y = x * cos + direction * rotate_half(x) * sin; direction -1 is the transpose. */
void rotate(const float *x, float *y, const float *cos, const float *sin, i64 rows, i64 heads,
            i64 width, float direction) {
  i64 half = width / 2;
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    const float *c = cos + n * width, *s = sin + n * width;
    for (i64 h = 0; h < heads; h++) {
      const float *a = x + (n * heads + h) * width;
      float *o = y + (n * heads + h) * width;
      if (direction > 0.0f) {
#pragma omp simd
        for (i64 j = 0; j < half; j++) {
          o[j] = a[j] * c[j] - a[j + half] * s[j];
          o[j + half] = a[j + half] * c[j + half] + a[j] * s[j + half];
        }
      } else {
#pragma omp simd
        for (i64 j = 0; j < half; j++) {
          o[j] = a[j] * c[j] + a[j + half] * s[j + half];
          o[j + half] = a[j + half] * c[j + half] - a[j] * s[j];
        }
      }
    }
  }
}

/* `rotate` of the first `rotated` channels of heads that are divided by their root mean square and
 * multiplied by offset + weight, as are their other channels. Rows and heads of x have strides. */
void normed_rotary(const float *x, const float *weight, float *y, const float *cos, const float *sin,
                   i64 rows, i64 heads, i64 width, i64 row_stride, i64 head_stride, i64 rotated,
                   float epsilon, float offset) {
  i64 half = rotated / 2;
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    const float *c = cos + n * rotated, *s = sin + n * rotated;
    for (i64 h = 0; h < heads; h++) {
      const float *a = x + n * row_stride + h * head_stride;
      float *o = y + (n * heads + h) * width, square = 0.0f;
#pragma omp simd reduction(+ : square)
      for (i64 j = 0; j < width; j++) square += a[j] * a[j];
      float inverse = 1.0f / sqrtf(square / width + epsilon);
#pragma omp simd
      for (i64 j = 0; j < half; j++) {
        float first = a[j] * inverse * (offset + weight[j]);
        float second = a[j + half] * inverse * (offset + weight[j + half]);
        o[j] = first * c[j] - second * s[j];
        o[j + half] = second * c[j + half] + first * s[j + half];
      }
#pragma omp simd
      for (i64 j = rotated; j < width; j++) o[j] = a[j] * inverse * (offset + weight[j]);
    }
  }
}

/* ---- norms ---- */

/* y = (x - mean) / deviation * (offset + weight) + bias. Without `centres` the mean is 0; without a
 * weight the factor is 1. statistics[N][2]: mean and inverse deviation, or NULL. */
void norm_forward(const float *x, const float *weight, const float *bias, float *y,
                  float *statistics, i64 rows, i64 channels, float epsilon, float offset,
                  int centres) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < rows; i++) {
    const float *a = x + i * channels;
    float *o = y + i * channels, mean = 0.0f, square = 0.0f;
    if (centres) {
#pragma omp simd reduction(+ : mean)
      for (i64 j = 0; j < channels; j++) mean += a[j];
      mean /= channels;
    }
#pragma omp simd reduction(+ : square)
    for (i64 j = 0; j < channels; j++) square += (a[j] - mean) * (a[j] - mean);
    float inverse = 1.0f / sqrtf(square / channels + epsilon);
    if (statistics) {
      statistics[2 * i] = mean;
      statistics[2 * i + 1] = inverse;
    }
    if (bias) {
#pragma omp simd
      for (i64 j = 0; j < channels; j++)
        o[j] = (a[j] - mean) * inverse * (offset + weight[j]) + bias[j];
    } else if (weight) {
#pragma omp simd
      for (i64 j = 0; j < channels; j++) o[j] = (a[j] - mean) * inverse * (offset + weight[j]);
    } else {
#pragma omp simd
      for (i64 j = 0; j < channels; j++) o[j] = (a[j] - mean) * inverse;
    }
  }
}

/* Gradients of `norm_forward`. `sums` has room for T * 2 * C floats; grad_weight and grad_bias may be
 * NULL. Returns nothing: the sums of the threads are added in their order. */
void norm_backward(const float *x, const float *weight, const float *grad, const float *statistics,
                   float *grad_x, float *grad_weight, float *grad_bias, float *sums, i64 rows,
                   i64 channels, float offset, int centres) {
  int threads = omp_get_max_threads();
  memset(sums, 0, sizeof(float) * (size_t)threads * 2 * channels);
#pragma omp parallel
  {
    float *of_weight = sums + (size_t)omp_get_thread_num() * 2 * channels;
    float *of_bias = of_weight + channels;
#pragma omp for schedule(static)
    for (i64 i = 0; i < rows; i++) {
      const float *a = x + i * channels, *g = grad + i * channels;
      float *o = grad_x + i * channels;
      float mean = statistics[2 * i], inverse = statistics[2 * i + 1], plain = 0.0f, along = 0.0f;
      if (weight) {
#pragma omp simd reduction(+ : plain, along)
        for (i64 j = 0; j < channels; j++) {
          float standard = (a[j] - mean) * inverse, scaled = g[j] * (offset + weight[j]);
          plain += scaled;
          along += scaled * standard;
          of_weight[j] += g[j] * standard;
          of_bias[j] += g[j];
        }
        plain = centres ? plain / channels : 0.0f;
        along /= channels;
#pragma omp simd
        for (i64 j = 0; j < channels; j++) {
          float standard = (a[j] - mean) * inverse;
          o[j] = inverse * (g[j] * (offset + weight[j]) - plain - standard * along);
        }
      } else {
#pragma omp simd reduction(+ : along)
        for (i64 j = 0; j < channels; j++) along += g[j] * ((a[j] - mean) * inverse);
        along /= channels;
#pragma omp simd
        for (i64 j = 0; j < channels; j++)
          o[j] = inverse * (g[j] - (a[j] - mean) * inverse * along);
      }
    }
  }
  for (i64 j = 0; j < channels; j++) {
    float of_weight = 0.0f, of_bias = 0.0f;
    for (int t = 0; t < threads; t++) {
      of_weight += sums[(size_t)t * 2 * channels + j];
      of_bias += sums[(size_t)t * 2 * channels + channels + j];
    }
    if (grad_weight) grad_weight[j] = of_weight;
    if (grad_bias) grad_bias[j] = of_bias;
  }
}

/* ---- gated DeltaNet; letters of paddle_vl/nn/delta_rule.py: B batch, L length, E channels, J taps,
 * K key heads, N value heads, C key width, V value width ---- */

/* What a gate leaves, and its slope: its sigmoid, or SiLU. */
static inline __attribute__((always_inline)) float opened(float gate, int is_sigmoid,
                                                          float *slope) {
  float s = sigmoid_of(gate, 0, slope);
  *slope = is_sigmoid ? s * (1.0f - s) : *slope;
  return is_sigmoid ? s : gate * s;
}

/* weight * (x / sqrt(mean(x^2) + epsilon)) * opened(gate). inverses[N]: 1 / that root. */
void gated_norm_forward(const float *x, const float *gate, const float *weight, float *y,
                        float *inverses, i64 rows, i64 channels, float epsilon, int is_sigmoid) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < rows; i++) {
    const float *a = x + i * channels, *z = gate + i * channels;
    float *o = y + i * channels, square = 0.0f;
#pragma omp simd reduction(+ : square)
    for (i64 j = 0; j < channels; j++) square += a[j] * a[j];
    float inverse = 1.0f / sqrtf(square / channels + epsilon);
    inverses[i] = inverse;
#pragma omp simd
    for (i64 j = 0; j < channels; j++) {
      float slope;
      o[j] = a[j] * inverse * weight[j] * opened(z[j], is_sigmoid, &slope);
    }
  }
}

/* Gradients of `gated_norm_forward`. `sums` has room for T * C floats. */
void gated_norm_backward(const float *x, const float *gate, const float *weight, const float *grad,
                         const float *inverses, float *grad_x, float *grad_gate,
                         float *grad_weight, float *sums, i64 rows, i64 channels,
                         int is_sigmoid) {
  int threads = omp_get_max_threads();
  memset(sums, 0, sizeof(float) * (size_t)threads * channels);
#pragma omp parallel
  {
    float *of_weight = sums + (size_t)omp_get_thread_num() * channels;
#pragma omp for schedule(static)
    for (i64 i = 0; i < rows; i++) {
      const float *a = x + i * channels, *z = gate + i * channels, *g = grad + i * channels;
      float *o = grad_x + i * channels, *oz = grad_gate + i * channels;
      float inverse = inverses[i], along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (i64 j = 0; j < channels; j++) {
        float slope, standard = a[j] * inverse, open = opened(z[j], is_sigmoid, &slope);
        oz[j] = g[j] * standard * weight[j] * slope;
        of_weight[j] += g[j] * standard * open;
        o[j] = g[j] * open * weight[j];
        along += o[j] * standard;
      }
      along /= channels;
#pragma omp simd
      for (i64 j = 0; j < channels; j++) o[j] = inverse * (o[j] - a[j] * inverse * along);
    }
  }
  for (i64 j = 0; j < channels; j++) {
    float of_weight = 0.0f;
    for (int t = 0; t < threads; t++) of_weight += sums[(size_t)t * channels + j];
    grad_weight[j] = of_weight;
  }
}

enum { MOST_TAPS = 8, LANES = 64, SUMMED = 128 };

/* The token so many places before token t, or NULL if it is none of its sample; places[B * L] are
 * those of the tokens in their samples, NULL if a sample is a row of the batch. */
static inline const float *token_before(const float *u, const float *before, const int32_t *places,
                                        i64 b, i64 t, i64 back, i64 length, i64 channels, i64 taps) {
  if (t < 0 || (places && places[b * length + t] < back)) return NULL;
  if (t >= back) return u + (b * length + t - back) * channels;
  return before ? before + (b * (taps - 1) + taps - 1 + t - back) * channels : NULL;
}

/* silu(y) of y[t] = sum over j of weight[:, j] u[t - (J - 1) + j]; weight[J][E]. `before` has the
 * J - 1 tokens before the first of every row, or is NULL. */
void convolution_forward(const float *u, const float *before, const float *weight,
                         const int32_t *places, float *y, i64 batch, i64 length, i64 channels,
                         i64 taps) {
#pragma omp parallel for schedule(static) if (batch * length * channels > 16384)
  for (i64 i = 0; i < batch * length; i++) {
    const float *a = u + i * channels, *w = weight + (taps - 1) * channels;
    float *o = y + i * channels;
#pragma omp simd
    for (i64 j = 0; j < channels; j++) o[j] = a[j] * w[j];
    for (i64 back = 1; back < taps; back++) {
      a = token_before(u, before, places, i / length, i % length, back, length, channels, taps);
      w -= channels;
      if (!a) continue;
#pragma omp simd
      for (i64 j = 0; j < channels; j++) o[j] += a[j] * w[j];
    }
#pragma omp simd
    for (i64 j = 0; j < channels; j++) {
      float slope;
      o[j] *= sigmoid_of(o[j], 0, &slope);
    }
  }
}

/* Gradients of `count` channels from the first on, all tokens from the last to the first: `later`
 * has the gradients of y of the J tokens from this one on. The sums of the weight are taken in parts
 * of SUMMED tokens. */
static inline __attribute__((always_inline)) void convolution_lanes(
    const float *u, const float *before, const float *weight, const int32_t *places,
    const float *grad, float *grad_u, float *grad_before, float *grad_weight, i64 batch, i64 length,
    i64 channels, i64 taps, i64 first, i64 count) {
  float later[MOST_TAPS][LANES], part[MOST_TAPS][LANES], sum[MOST_TAPS][LANES];
  memset(part, 0, sizeof part);
  memset(sum, 0, sizeof sum);
  for (i64 b = 0; b < batch; b++) {
    for (i64 t = length - 1; t >= (before ? 1 - taps : 0); t--) {
      float *d = later[(t + taps) % taps], from[LANES] = {0.0f};
      if (t >= 0) {
        const float *seen[MOST_TAPS], *g = grad + (b * length + t) * channels + first;
        float y[LANES] = {0.0f};
        for (i64 back = 0; back < taps; back++) {
          const float *w = weight + (taps - 1 - back) * channels + first;
          seen[back] = token_before(u, before, places, b, t, back, length, channels, taps);
          if (!seen[back]) continue;
          seen[back] += first;
#pragma omp simd
          for (i64 j = 0; j < count; j++) y[j] += seen[back][j] * w[j];
        }
#pragma omp simd
        for (i64 j = 0; j < count; j++) {
          float slope;
          sigmoid_of(y[j], 0, &slope);
          d[j] = g[j] * slope;
        }
        for (i64 back = 0; back < taps; back++) {
          float *of_weight = part[taps - 1 - back];
          if (!seen[back]) continue;
#pragma omp simd
          for (i64 j = 0; j < count; j++) of_weight[j] += d[j] * seen[back][j];
        }
      }
      for (i64 back = t < 0 ? -t : 0; back < taps && t + back < length; back++) {
        const float *w = weight + (taps - 1 - back) * channels + first;
        const float *of = later[(t + back + taps) % taps];
        if (places && places[b * length + t + back] < back) continue;
#pragma omp simd
        for (i64 j = 0; j < count; j++) from[j] += of[j] * w[j];
      }
      float *o = t >= 0 ? grad_u + (b * length + t) * channels + first
                        : grad_before + (b * (taps - 1) + taps - 1 + t) * channels + first;
      memcpy(o, from, sizeof(float) * count);
      if (t > 0 && t % SUMMED) continue;
      for (i64 k = 0; k < taps; k++) {
        for (i64 j = 0; j < count; j++) sum[k][j] += part[k][j];
      }
      memset(part, 0, sizeof part);
    }
  }
  for (i64 k = 0; k < taps; k++)
    memcpy(grad_weight + k * channels + first, sum[k], sizeof(float) * count);
}

/* Gradients of `convolution_forward`; that of `before` only if there are such tokens. */
void convolution_backward(const float *u, const float *before, const float *weight,
                          const int32_t *places, const float *grad, float *grad_u,
                          float *grad_before, float *grad_weight, i64 batch, i64 length,
                          i64 channels, i64 taps) {
#pragma omp parallel for schedule(static)
  for (i64 first = 0; first < channels; first += LANES) {
    if (channels - first >= LANES)
      convolution_lanes(u, before, weight, places, grad, grad_u, grad_before, grad_weight, batch,
                        length, channels, taps, first, LANES);
    else
      convolution_lanes(u, before, weight, places, grad, grad_u, grad_before, grad_weight, batch,
                        length, channels, taps, first, channels - first);
  }
}

static inline float inverse_length(const float *x, i64 width) {
  float square = 0.0f;
#pragma omp simd reduction(+ : square)
  for (i64 j = 0; j < width; j++) square += x[j] * x[j];
  return 1.0f / sqrtf(square + 1e-6f);
}

enum { MOST_VALUES = 1024 };

/* One token of the gated delta rule. before[B][N][C][V] may be NULL, for zeros; `after` may be it. */
void delta_token(const float *q, const float *k, const float *v, const float *decay,
                 const float *beta, const float *before, float *after, float *out, i64 batch,
                 i64 key_heads, i64 heads, i64 width, i64 values) {
#pragma omp parallel for schedule(static) if (batch * heads * width * values > 65536)
  for (i64 i = 0; i < batch * heads; i++) {
    i64 head = i / heads * key_heads + i % heads / (heads / key_heads);
    const float *query = q + head * width, *key = k + head * width, *value = v + i * values;
    const float *m = before ? before + i * width * values : NULL;
    float *to = after + i * width * values, *o = out + i * values, delta[MOST_VALUES];
    float of_key = inverse_length(key, width), kept = fast_exp(decay[i]);
    float of_query = inverse_length(query, width) / sqrtf((float)width);
    for (i64 j = 0; j < values; j++) delta[j] = o[j] = 0.0f;
    for (i64 c = 0; m && c < width; c++) {
      float factor = key[c] * of_key * kept;
#pragma omp simd
      for (i64 j = 0; j < values; j++) delta[j] += factor * m[c * values + j];
    }
#pragma omp simd
    for (i64 j = 0; j < values; j++) delta[j] = beta[i] * (value[j] - delta[j]);
    for (i64 c = 0; c < width; c++) {
      float by_key = key[c] * of_key, by_query = query[c] * of_query, *row = to + c * values;
      if (m) {
#pragma omp simd
        for (i64 j = 0; j < values; j++) row[j] = kept * m[c * values + j] + by_key * delta[j];
      } else {
#pragma omp simd
        for (i64 j = 0; j < values; j++) row[j] = by_key * delta[j];
      }
#pragma omp simd
      for (i64 j = 0; j < values; j++) o[j] += by_query * row[j];
    }
  }
}

enum { CHUNK = 64 };

/* Arguments of the delta rule; sequences[S + 1] has their first token rows and the end. */
typedef struct {
  const float *q, *k, *v, *decay, *beta;
  const i64 *sequences;
  i64 num_sequences, key_heads, heads, width, values;
} Rule;

/* Of a chunk of at most CHUNK tokens, which are rows. Letters as in delta_rule.py, but A^-1 is
 * applied to beta (V - exp(G) K M) alone, as the state M is known. */
typedef struct {
  float *rows;     /* [2P, C] queries and keys of length 1, queries times C^-0.5 */
  float *inverses; /* [2P] 1 over their lengths */
  float *products; /* [2P, P] of both with the keys */
  float *between;  /* [P, P] D; above the diagonal it is not written */
  float *below;    /* [P, P] A below its diagonal; the rest is not read */
  float *score;    /* [P, P] Q K^T * D, zero above the diagonal */
  float *held;     /* [2P, V] both times M */
  float *added;    /* [P, V] N */
  float *left, *right, *beta; /* [P] exp(G), exp(G_last - G), beta */
  float *next;     /* where the room goes on */
} Chunk;

static Chunk chunk_in(float *room, i64 width, i64 values) {
  Chunk c;
  c.rows = room;
  c.inverses = c.rows + 2 * CHUNK * width;
  c.products = c.inverses + 2 * CHUNK;
  c.between = c.products + 2 * CHUNK * CHUNK;
  c.below = c.between + CHUNK * CHUNK;
  c.score = c.below + CHUNK * CHUNK;
  c.held = c.score + CHUNK * CHUNK;
  c.added = c.held + 2 * CHUNK * values;
  c.left = c.added + CHUNK * values;
  c.right = c.left + CHUNK;
  c.beta = c.right + CHUNK;
  c.next = c.beta + CHUNK;
  return c;
}

static void product(int trans_a, int trans_b, i64 m, i64 n, i64 k, float alpha, const float *a,
                    i64 lda, const float *b, i64 ldb, float before, float *to) {
  cblas_sgemm(ROW_MAJOR, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, before, to, n);
}

/* Fill in a chunk of `count` tokens from a token row on, for the state before it. */
static void fill_chunk(const Rule *r, const Chunk *c, i64 token, i64 count, i64 head,
                       const float *state) {
  i64 width = r->width, values = r->values, key_head = head / (r->heads / r->key_heads);
  double total = 0.0, totals[CHUNK];
  for (i64 i = 0; i < count; i++) {
    i64 place = ((token + i) * r->key_heads + key_head) * width;
    i64 own = (token + i) * r->heads + head;
    for (int is_key = 0; is_key < 2; is_key++) {
      const float *x = (is_key ? r->k : r->q) + place;
      float *row = c->rows + (is_key * count + i) * width;
      float inverse = inverse_length(x, width);
      c->inverses[is_key * count + i] = inverse;
      if (!is_key) inverse /= sqrtf((float)width);
#pragma omp simd
      for (i64 j = 0; j < width; j++) row[j] = x[j] * inverse;
    }
    totals[i] = total += r->decay[own];
    c->beta[i] = r->beta[own];
  }
  const float *keys = c->rows + count * width;
  product(PLAIN, TRANSPOSED, 2 * count, count, width, 1.0f, c->rows, width, keys, width, 0.0f,
          c->products);
  product(PLAIN, PLAIN, 2 * count, values, width, 1.0f, c->rows, width, state, values, 0.0f,
          c->held);
  for (i64 i = 0; i < count; i++) {
    const float *of_query = c->products + i * count, *of_key = of_query + count * count;
    float *d = c->between + i * count, *b = c->below + i * count, *s = c->score + i * count;
#pragma omp simd
    for (i64 j = 0; j <= i; j++) {
      d[j] = fast_exp((float)(totals[i] - totals[j]));
      b[j] = c->beta[i] * of_key[j] * d[j];
      s[j] = of_query[j] * d[j];
    }
    memset(s + i + 1, 0, sizeof(float) * (count - i - 1));
    c->left[i] = fast_exp((float)totals[i]);
    c->right[i] = fast_exp((float)(total - totals[i]));
    const float *value = r->v + ((token + i) * r->heads + head) * values;
    const float *held = c->held + (count + i) * values;
    float *added = c->added + i * values, left = c->left[i], beta = c->beta[i];
#pragma omp simd
    for (i64 j = 0; j < values; j++) added[j] = beta * (value[j] - left * held[j]);
  }
  cblas_strsm(ROW_MAJOR, LEFT, LOWER, PLAIN, UNIT, count, values, 1.0f, c->below, count, c->added,
              values);
}

/* M <- exp(G_last) M + (exp(G_last - G) K)^T N. Scales the keys of the chunk in place. */
static void pass_chunk(const Rule *r, const Chunk *c, i64 count, float *state) {
  float *keys = c->rows + count * r->width;
  for (i64 i = 0; i < count; i++) {
    for (i64 j = 0; j < r->width; j++) keys[i * r->width + j] *= c->right[i];
  }
  product(TRANSPOSED, PLAIN, r->width, r->values, count, 1.0f, keys, r->width, c->added, r->values,
          c->left[count - 1], state);
}

static i64 num_chunks(const Rule *r, i64 sequence) {
  return (r->sequences[sequence + 1] - r->sequences[sequence] + CHUNK - 1) / CHUNK;
}

/* The gated delta rule; a task is a value head of a sequence. before[S][N][C][V] may be NULL, for
 * zeros. `kept` gets the states before all chunks [X][N][C][V], `after` those behind the sequences;
 * both may be NULL. `room` has T times `room_size` floats. */
void delta_forward(const float *q, const float *k, const float *v, const float *decay,
                   const float *beta, const float *before, const i64 *sequences, float *out,
                   float *after, float *kept, i64 num_sequences, i64 key_heads, i64 heads,
                   i64 width, i64 values, float *room, i64 room_size) {
  Rule r = {q, k, v, decay, beta, sequences, num_sequences, key_heads, heads, width, values};
  i64 size = width * values, num_tasks = num_sequences * heads, next = 0;
#pragma omp parallel
  {
    Chunk c = chunk_in(room + omp_get_thread_num() * room_size, width, values);
    float *state = c.next;
    for (i64 task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < num_tasks;) {
      i64 sequence = task / heads, head = task % heads, chunk = 0;
      for (i64 s = 0; kept && s < sequence; s++) chunk += num_chunks(&r, s);
      if (before) memcpy(state, before + task * size, sizeof(float) * size);
      else memset(state, 0, sizeof(float) * size);
      i64 end = sequences[sequence + 1];
      for (i64 token = sequences[sequence]; token < end; token += CHUNK, chunk++) {
        i64 count = end - token < CHUNK ? end - token : CHUNK;
        if (kept) memcpy(kept + (chunk * heads + head) * size, state, sizeof(float) * size);
        fill_chunk(&r, &c, token, count, head, state);
        float *to = out + (token * heads + head) * values;
        for (i64 i = 0; i < count; i++) {
          for (i64 j = 0; j < values; j++)
            to[i * heads * values + j] = c.left[i] * c.held[i * values + j];
        }
        cblas_sgemm(ROW_MAJOR, PLAIN, PLAIN, count, values, count, 1.0f, c.score, count, c.added,
                    values, 1.0f, to, heads * values);
        if (after || token + count < end) pass_chunk(&r, &c, count, state);
      }
      if (after) memcpy(after + task * size, state, sizeof(float) * size);
    }
  }
}

static inline float dot(const float *a, const float *b, i64 count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (i64 j = 0; j < count; j++) sum += a[j] * b[j];
  return sum;
}

/* Gradients of a chunk: `d_state` has that of the state behind it and gets that of the state before
 * it. Those of queries and keys are added. */
static void chunk_gradients(const Rule *r, const Chunk *c, i64 token, i64 count, i64 head,
                            const float *state, const float *grad, float *d_q, float *d_k,
                            float *d_v, float *d_decay, float *d_beta, float *d_state) {
  i64 width = r->width, values = r->values, key_head = head / (r->heads / r->key_heads);
  float *d_added = c->next;                       /* [P, V] */
  float *d_held = d_added + CHUNK * values;       /* [2P, V] */
  float *d_rows = d_held + 2 * CHUNK * values;    /* [2P, C] */
  float *d_right = d_rows + 2 * CHUNK * width;    /* [P, C] */
  float *d_products = d_right + CHUNK * width;    /* [2P, P] */
  float *d_score = d_products + 2 * CHUNK * CHUNK; /* [P, P] */
  const float *keys = c->rows + count * width;
  double d_totals[CHUNK], d_last = 0.0;
  i64 stride = r->heads * values;
  grad += (token * r->heads + head) * values;
  fill_chunk(r, c, token, count, head, state);
  /* N: from the outputs and from the state behind. */
  product(PLAIN, PLAIN, count, values, width, 1.0f, keys, width, d_state, values, 0.0f, d_added);
  for (i64 i = 0; i < count; i++) {
    for (i64 j = 0; j < values; j++) d_added[i * values + j] *= c->right[i];
  }
  cblas_sgemm(ROW_MAJOR, TRANSPOSED, PLAIN, count, values, count, 1.0f, c->score, count, grad,
              stride, 1.0f, d_added, values);
  cblas_sgemm(ROW_MAJOR, PLAIN, TRANSPOSED, count, count, values, 1.0f, grad, stride, c->added,
              values, 0.0f, d_score, count);
  product(PLAIN, TRANSPOSED, count, width, values, 1.0f, c->added, values, d_state, values, 0.0f,
          d_right);
  cblas_strsm(ROW_MAJOR, LEFT, LOWER, TRANSPOSED, UNIT, count, values, 1.0f, c->below, count,
              d_added, values);
  /* d_added is now that of A N. */
  float *d_below = d_products + count * count;
  product(PLAIN, TRANSPOSED, count, count, values, -1.0f, d_added, values, c->added, values, 0.0f,
          d_below);
  for (i64 i = 0; i < count; i++) {
    i64 own = (token + i) * r->heads + head;
    const float *value = r->v + own * values, *held = c->held + (count + i) * values;
    const float *given = d_added + i * values, *g = grad + i * stride;
    float *of_query = d_held + i * values, *of_key = d_held + (count + i) * values;
    float *of_value = d_v + own * values, left = c->left[i], beta = c->beta[i], of_beta = 0.0f;
#pragma omp simd reduction(+ : of_beta)
    for (i64 j = 0; j < values; j++) {
      of_value[j] = beta * given[j];
      of_query[j] = left * g[j];
      of_key[j] = -beta * left * given[j];
      of_beta += given[j] * (value[j] - left * held[j]);
    }
    /* Through A and D; of D's exponents G_i - G_j. */
    const float *d = c->between + i * count, *key = c->products + (count + i) * count;
    const float *query = c->products + i * count;
    float *b = d_below + i * count, *s = d_score + i * count, *p = d_products + i * count;
    float of_total = 0.0f;
#pragma omp simd reduction(+ : of_beta, of_total)
    for (i64 j = 0; j < i; j++) {
      float of_product = b[j] * d[j];
      of_beta += of_product * key[j];
      b[j] = of_product * beta;
      p[j] = s[j] * d[j];
      s[j] = b[j] * key[j] + p[j] * query[j];
      of_total += s[j];
    }
    d_totals[i] = of_total;
    for (i64 j = 0; j < i; j++) d_totals[j] -= s[j];
    p[i] = s[i];
    b[i] = 0.0f;
    memset(p + i + 1, 0, sizeof(float) * (count - i - 1));
    memset(b + i + 1, 0, sizeof(float) * (count - i - 1));
    d_beta[own] = of_beta;
    /* Through exp(G_last - G) of the state behind. */
    float *from = d_right + i * width, towards = dot(from, keys + i * width, width) * c->right[i];
    for (i64 j = 0; j < width; j++) from[j] *= c->right[i];
    d_totals[i] -= towards;
    d_last += towards;
  }
  d_last += (double)dot(state, d_state, width * values) * c->left[count - 1];
  product(TRANSPOSED, PLAIN, width, values, 2 * count, 1.0f, c->rows, width, d_held, values,
          c->left[count - 1], d_state);
  product(PLAIN, TRANSPOSED, 2 * count, width, values, 1.0f, d_held, values, state, values, 0.0f,
          d_rows);
  for (i64 i = 0; i < count; i++) {
    const float *row = c->rows + i * width, *d = d_rows + i * width;
    d_totals[i] += dot(row, d, width) + dot(row + count * width, d + count * width, width);
  }
  /* Both products with the keys: of their rows, then of the keys. */
  product(PLAIN, PLAIN, 2 * count, width, count, 1.0f, d_products, count, keys, width, 1.0f,
          d_rows);
  float *d_keys = d_rows + count * width;
  product(TRANSPOSED, PLAIN, count, width, 2 * count, 1.0f, d_products, count, c->rows, width, 1.0f,
          d_keys);
  for (i64 i = 0; i < count * width; i++) d_keys[i] += d_right[i];
  /* g_j is in G_j and all later ones. */
  for (i64 i = count - 1; i >= 0; i--) {
    d_last += d_totals[i];
    d_decay[(token + i) * r->heads + head] = d_last;
  }
  for (i64 i = 0; i < 2 * count; i++) {
    i64 is_key = i >= count, place = ((token + i % count) * r->key_heads + key_head) * width;
    float *to = (is_key ? d_k : d_q) + place, inverse = c->inverses[i];
    const float *row = c->rows + i * width, *d = d_rows + i * width;
    float along = dot(row, d, width), scale = is_key ? 1.0f : 1.0f / sqrtf((float)width);
    if (!is_key) along *= width;
#pragma omp simd
    for (i64 j = 0; j < width; j++) to[j] += inverse * scale * (d[j] - row[j] * along);
  }
}

/* Gradients of `delta_forward` without states before and behind the sequences; a task is a key head
 * of a sequence. */
void delta_backward(const float *q, const float *k, const float *v, const float *decay,
                    const float *beta, const float *kept, const i64 *sequences, const float *grad,
                    float *d_q, float *d_k, float *d_v, float *d_decay, float *d_beta,
                    i64 num_sequences, i64 key_heads, i64 heads, i64 width, i64 values, float *room,
                    i64 room_size) {
  Rule r = {q, k, v, decay, beta, sequences, num_sequences, key_heads, heads, width, values};
  i64 size = width * values, groups = heads / key_heads;
  i64 num_tasks = num_sequences * key_heads, next = 0;
#pragma omp parallel
  {
    float *d_state = room + omp_get_thread_num() * room_size;
    Chunk c = chunk_in(d_state + size, width, values);
    for (i64 task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < num_tasks;) {
      i64 sequence = task / key_heads, key_head = task % key_heads, first_chunk = 0;
      i64 begin = sequences[sequence], end = sequences[sequence + 1];
      for (i64 s = 0; s < sequence; s++) first_chunk += num_chunks(&r, s);
      for (i64 token = begin; token < end; token++) {
        memset(d_q + (token * key_heads + key_head) * width, 0, sizeof(float) * width);
        memset(d_k + (token * key_heads + key_head) * width, 0, sizeof(float) * width);
      }
      for (i64 head = key_head * groups; head < (key_head + 1) * groups; head++) {
        memset(d_state, 0, sizeof(float) * size);
        for (i64 chunk = num_chunks(&r, sequence) - 1; chunk >= 0; chunk--) {
          i64 token = begin + chunk * CHUNK, count = end - token < CHUNK ? end - token : CHUNK;
          const float *state = kept + ((first_chunk + chunk) * heads + head) * size;
          chunk_gradients(&r, &c, token, count, head, state, grad, d_q, d_k, d_v, d_decay, d_beta,
                          d_state);
        }
      }
    }
  }
}

/* ---- attention ---- */

enum { BLOCK = 128 };

/* Segments of rows, each of which sees keys of its own: first query row, number of query rows, first
 * key row, number of key rows. Causal: the last query sees the last key. */
typedef struct {
  i64 query, queries, key, keys;
} Segment;

/* Number of keys that some of the rows [begin, begin + count) of a segment may see. `ends`: the last
 * key that a row sees plus one, for all rows; NULL without a mask. */
static i64 seen_keys(const Segment *s, i64 begin, i64 count, int causal, const int32_t *ends) {
  if (causal) return s->keys - s->queries + begin + count;
  if (!ends) return s->keys;
  i64 keys = 0;
  for (i64 r = 0; r < count; r++) {
    i64 end = ends[s->query + begin + r];
    keys = end > keys ? end : keys;
  }
  return keys;
}

/* Scores of rows [begin, begin + count) of a segment with the first keys; hidden ones become
 * `hidden`. */
static void score_rows(const Segment *s, i64 begin, i64 count, i64 keys, const float *q,
                       const float *k, i64 query_stride, i64 key_stride, i64 width, float scale,
                       const float *key_bias, const uint8_t *visible, i64 mask_keys, float hidden,
                       float *scores) {
  cblas_sgemm(ROW_MAJOR, PLAIN, TRANSPOSED, count, keys, width, scale,
              q + (s->query + begin) * query_stride, query_stride, k + s->key * key_stride,
              key_stride, 0.0f, scores, keys);
  for (i64 r = 0; r < count; r++) {
    float *row = scores + r * keys;
    if (key_bias) {
      const float *bias = key_bias + s->key;
#pragma omp simd
      for (i64 j = 0; j < keys; j++) row[j] += bias[j];
    }
    if (visible) {
      const uint8_t *sees = visible + (s->query + begin + r) * mask_keys;
#pragma omp simd
      for (i64 j = 0; j < keys; j++) row[j] = sees[j] ? row[j] : hidden;
    }
  }
}

/* out = softmax(scale * q @ k^T + bias) @ v, and per row and head the largest score and the inverse of
 * the sum of exponentials. A row that sees no key gets zero. Rows [N][heads][H]; `visible` and
 * `ends` are a mask or NULL; `room` has T * BLOCK * longest keys floats. */
void attention_forward(const float *q, const float *k, const float *v, float *out,
                       float *statistics, const Segment *segments, i64 num_segments,
                       i64 query_heads, i64 key_heads, i64 width, float scale, int causal,
                       const float *key_bias, const uint8_t *visible, const int32_t *ends,
                       i64 mask_keys, float hidden, float *room, i64 room_size) {
  i64 groups = query_heads / key_heads, query_stride = query_heads * width;
  i64 key_stride = key_heads * width, num_tasks = 0, next = 0;
  for (i64 s = 0; s < num_segments; s++)
    num_tasks += query_heads * ((segments[s].queries + BLOCK - 1) / BLOCK);
#pragma omp parallel
  {
    float *scores = room + (size_t)omp_get_thread_num() * room_size;
    i64 segment = 0, before = 0;
    for (i64 task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < num_tasks;) {
      /* Tasks of a thread ascend. */
      i64 blocks = (segments[segment].queries + BLOCK - 1) / BLOCK;
      while (task >= before + query_heads * blocks) {
        before += query_heads * blocks;
        segment++;
        blocks = (segments[segment].queries + BLOCK - 1) / BLOCK;
      }
      const Segment *s = segments + segment;
      i64 head = (task - before) / blocks, block = blocks - 1 - (task - before) % blocks;
      i64 begin = block * BLOCK;
      i64 count = s->queries - begin < BLOCK ? s->queries - begin : BLOCK;
      const float *key = k + head / groups * width, *value = v + head / groups * width;
      i64 keys = seen_keys(s, begin, count, causal, ends);
      float *rows = out + (s->query + begin) * query_stride + head * width;
      if (keys == 0) {
        for (i64 r = 0; r < count; r++) memset(rows + r * query_stride, 0, sizeof(float) * width);
        continue;
      }
      score_rows(s, begin, count, keys, q + head * width, key, query_stride, key_stride, width,
                 scale, key_bias, visible, mask_keys, hidden, scores);
      float inverse[BLOCK];
      for (i64 r = 0; r < count; r++) {
        float *row = scores + r * keys, largest = -INFINITY, sum = 0.0f;
        i64 seen = causal ? keys - count + r + 1 : keys;
#pragma omp simd reduction(max : largest)
        for (i64 j = 0; j < seen; j++) largest = row[j] > largest ? row[j] : largest;
#pragma omp simd reduction(+ : sum)
        for (i64 j = 0; j < seen; j++) {
          row[j] = fast_exp(row[j] - largest);
          sum += row[j];
        }
        memset(row + seen, 0, sizeof(float) * (keys - seen));
        inverse[r] = 1.0f / sum;
        if (visible && ends[s->query + begin + r] == 0) inverse[r] = 0.0f;
        float *kept = statistics + ((s->query + begin + r) * query_heads + head) * 2;
        kept[0] = largest;
        kept[1] = inverse[r];
      }
      cblas_sgemm(ROW_MAJOR, PLAIN, PLAIN, count, width, keys, 1.0f, scores, keys,
                  value + s->key * key_stride, key_stride, 0.0f, rows, query_stride);
      for (i64 r = 0; r < count; r++) {
#pragma omp simd
        for (i64 j = 0; j < width; j++) rows[r * query_stride + j] *= inverse[r];
      }
    }
  }
}

/* Eight floats; every `PICK` of them here is one instruction on x86. */
typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(32)));
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif
enum { KEYS = 8, KEY_BLOCK = 32 };  /* keys at a time; and of a block, as far ahead are fetched */

static inline __attribute__((always_inline)) Lanes sums_of_pairs(Lanes a, Lanes b) {
  return PICK(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + PICK(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

/* Products of a query with eight keys. */
static inline __attribute__((always_inline)) Lanes key_products(const float *query,
                                                                const float *const *key, i64 width) {
  Lanes s[KEYS] = {{0.0f}};
  i64 i = 0;
  for (; i + 8 <= width; i += 8) {
    Lanes x = *(const Lanes *)(query + i);
    for (int n = 0; n < KEYS; n++) s[n] += x * *(const Lanes *)(key[n] + i);
  }
  for (; i < width; i++)
    for (int n = 0; n < KEYS; n++) s[n][0] += query[i] * key[n][i];
  Lanes a = sums_of_pairs(sums_of_pairs(s[0], s[1]), sums_of_pairs(s[2], s[3]));
  Lanes b = sums_of_pairs(sums_of_pairs(s[4], s[5]), sums_of_pairs(s[6], s[7]));
  return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

/* sum += weights @ values, of `count` keys. */
static inline __attribute__((always_inline)) void add_values(const float *weight,
                                                             const float *const *value, i64 count,
                                                             i64 width, float *sum) {
  i64 i = 0;
  for (; i + 32 <= width; i += 32) {
    Lanes s[4];
    for (int n = 0; n < 4; n++) s[n] = *(Lanes *)(sum + i + 8 * n);
    for (i64 j = 0; j < count; j++)
      for (int n = 0; n < 4; n++) s[n] += weight[j] * *(const Lanes *)(value[j] + i + 8 * n);
    for (int n = 0; n < 4; n++) *(Lanes *)(sum + i + 8 * n) = s[n];
  }
  for (; i < width; i++)
    for (i64 j = 0; j < count; j++) sum[i] += weight[j] * value[j][i];
}

/* Key or value j of a row, or its last one; those of a block later are fetched into the cache. */
static inline const float *key_of_row(const float *k, const i64 *place, i64 stride, i64 j, i64 keys,
                                      i64 width) {
  i64 own = j < keys ? j : keys - 1, later = j + KEY_BLOCK < keys ? j + KEY_BLOCK : keys - 1;
  const float *far = k + (place ? place[later] : later) * stride;
  for (i64 i = 0; i < width; i += 16) __builtin_prefetch(far + i);
  return k + (place ? place[own] : own) * stride;
}

/* One query of each row over the keys of that row. Key j of a row and a head lies at row * row_stride +
 * head * head_stride + place * place_stride of `k`, its place being places[offsets[row] + j], or j
 * itself where `places` is NULL: then all rows have `length` keys, of which `bias` [rows][length], if
 * there is one, is added to the scores. New keys and values [rows][key heads][H], if there are any,
 * are written first, at the last place of their row. `room` has T * query heads * longest keys floats.
 *
 * A task is a row, whose heads often lie side by side, or a key head of one if there are few rows. */
void token_attention(const float *q, const float *new_k, const float *new_v, float *k, float *v,
                     const i64 *places, const int32_t *offsets, const float *bias, float *out,
                     i64 rows, i64 query_heads, i64 key_heads, i64 width, i64 row_stride,
                     i64 head_stride, i64 place_stride, i64 length, float scale, float *room,
                     i64 room_size) {
  i64 groups = query_heads / key_heads, parts = rows < omp_get_max_threads() ? key_heads : 1;
  i64 heads = key_heads / parts, num_tasks = rows * parts, next = 0;
#pragma omp parallel
  {
    float *scores = room + (size_t)omp_get_thread_num() * room_size;
    for (i64 task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < num_tasks;) {
      i64 row = task / parts, first = task % parts * heads;
      i64 keys = places ? offsets[row + 1] - offsets[row] : length;
      const i64 *place = places ? places + offsets[row] : NULL;
      float *key = k + row * row_stride + first * head_stride;
      float *value = v + row * row_stride + first * head_stride;
      if (new_k) {
        i64 last = (place ? place[keys - 1] : keys - 1) * place_stride;
        for (i64 h = 0; h < heads; h++) {
          i64 from = (row * key_heads + first + h) * width;
          memcpy(key + last + h * head_stride, new_k + from, sizeof(float) * width);
          memcpy(value + last + h * head_stride, new_v + from, sizeof(float) * width);
        }
      }
      const float *query = q + (row * query_heads + first * groups) * width;
      float *result = out + (row * query_heads + first * groups) * width;
      for (i64 j = 0; j < keys; j += KEYS) {
        i64 count = keys - j < KEYS ? keys - j : KEYS;
        for (i64 h = 0; h < heads; h++) {
          const float *own[KEYS];
          for (i64 n = 0; n < KEYS; n++)
            own[n] = key_of_row(key + h * head_stride, place, place_stride, j + n, keys, width);
          for (i64 g = h * groups; g < (h + 1) * groups; g++) {
            Lanes s = scale * key_products(query + g * width, own, width);
            for (i64 n = 0; n < count; n++)
              scores[g * keys + j + n] = s[n] + (bias ? bias[row * length + j + n] : 0.0f);
          }
        }
      }
      for (i64 g = 0; g < heads * groups; g++) {
        float *score = scores + g * keys, largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
        for (i64 j = 0; j < keys; j++) largest = score[j] > largest ? score[j] : largest;
#pragma omp simd reduction(+ : sum)
        for (i64 j = 0; j < keys; j++) {
          score[j] = fast_exp(score[j] - largest);
          sum += score[j];
        }
        sum = 1.0f / sum;
#pragma omp simd
        for (i64 j = 0; j < keys; j++) score[j] *= sum;
      }
      memset(result, 0, sizeof(float) * heads * groups * width);
      for (i64 j = 0; j < keys; j += KEY_BLOCK) {
        i64 count = keys - j < KEY_BLOCK ? keys - j : KEY_BLOCK;
        for (i64 h = 0; h < heads; h++) {
          const float *own[KEY_BLOCK];
          for (i64 n = 0; n < count; n++)
            own[n] = key_of_row(value + h * head_stride, place, place_stride, j + n, keys, width);
          for (i64 g = h * groups; g < (h + 1) * groups; g++)
            add_values(scores + g * keys + j, own, count, width, result + g * width);
        }
      }
    }
  }
}

/* ---- parts of a decoder layer for one token of each row, whose linears have no bias ---- */

/* down(silu(gate) * up), where x[rows][width] gate_up[width][2 * inner] are gate and up. `room` has
 * rows * 3 * inner floats. */
void token_mlp(const float *x, const float *gate_up, const float *down, float *y, i64 rows,
               i64 width, i64 inner, float *room) {
  float *gated = room + rows * 2 * inner;
  product(PLAIN, PLAIN, rows, 2 * inner, width, 1.0f, x, width, gate_up, 2 * inner, 0.0f, room);
  gated_forward(room, room + inner, gated, rows, inner, 2 * inner, 0);
  product(PLAIN, PLAIN, rows, width, inner, 1.0f, gated, inner, down, width, 0.0f, y);
}

/* Projections, norms and rotation, `token_attention` of the new keys and values, gates, and the
 * output's projection. With `is_gated` each query head of `qkv` has a query, then a gate. `room` has
 * rows * (outputs of qkv + 2 * (query and key heads) * H) + T * query heads * longest floats. */
void token_self_attention(const float *x, const float *qkv, const float *projection,
                          const float *q_norm, const float *k_norm, const float *cos,
                          const float *sin, float *k, float *v, const i64 *places,
                          const int32_t *offsets, const float *bias, float *y, i64 rows,
                          i64 channels, i64 query_heads, i64 key_heads, i64 width, i64 rotated,
                          int is_gated, i64 row_stride, i64 head_stride, i64 place_stride,
                          i64 longest, float scale, float epsilon, float offset, float *room) {
  i64 query_width = query_heads * width, key_width = key_heads * width;
  i64 step = is_gated ? 2 * width : width, outputs = query_heads * step + 2 * key_width;
  float *q = room + rows * outputs, *new_k = q + rows * query_width;
  float *new_v = new_k + rows * key_width, *out = new_v + rows * key_width;
  product(PLAIN, PLAIN, rows, outputs, channels, 1.0f, x, channels, qkv, outputs, 0.0f, room);
  normed_rotary(room, q_norm, q, cos, sin, rows, query_heads, width, outputs, step, rotated, epsilon,
                offset);
  normed_rotary(room + query_heads * step, k_norm, new_k, cos, sin, rows, key_heads, width, outputs,
                width, rotated, epsilon, offset);
  for (i64 r = 0; r < rows; r++)
    memcpy(new_v + r * key_width, room + (r + 1) * outputs - key_width, sizeof(float) * key_width);
  token_attention(q, new_k, new_v, k, v, places, offsets, bias, out, rows, query_heads, key_heads,
                  width, row_stride, head_stride, place_stride, longest, scale,
                  out + rows * query_width, query_heads * longest);
  for (i64 h = 0; is_gated && h < rows * query_heads; h++) {
    const float *gate = room + h / query_heads * outputs + h % query_heads * step + width;
#pragma omp simd
    for (i64 j = 0; j < width; j++) out[h * width + j] *= 1.0f / (1.0f + fast_exp(-gate[j]));
  }
  product(PLAIN, PLAIN, rows, channels, query_width, 1.0f, out, query_width, projection, channels,
          0.0f, y);
}

/* A gated DeltaNet layer. `in_proj` gives queries, keys and values, the gate, and per value head beta
 * and decay before their functions. Token r replaces what row rows_of[r], or r, of inputs[.][J-1][E]
 * and state[.][N][C][V] holds. `room` has rows * (2 E + 2 N V + 5 N) floats. */
void token_delta_net(const float *x, const float *in_proj, const float *taps_of,
                     const float *decay_log, const float *decay_bias, const float *norm,
                     const float *out_proj, float *inputs, float *state, const i64 *rows_of,
                     float *y, i64 rows, i64 channels, i64 key_heads, i64 heads, i64 width,
                     i64 values, i64 taps, float epsilon, int is_sigmoid, float *room) {
  i64 key_width = key_heads * width, inner = heads * values, mixed = 2 * key_width + inner;
  i64 outputs = mixed + inner + 2 * heads;
  float *out = room + rows * outputs, *spare = out + rows * inner;
  product(PLAIN, PLAIN, rows, outputs, channels, 1.0f, x, channels, in_proj, outputs, 0.0f, room);
#pragma omp parallel for schedule(static) if (rows > 1)
  for (i64 r = 0; r < rows; r++) {
    i64 row = rows_of ? rows_of[r] : r;
    const float *u = room + r * outputs, *gate = u + mixed, *b = gate + inner, *a = b + heads;
    float *before = inputs + row * (taps - 1) * mixed, *held = state + row * inner * width;
    float *q = spare + r * (mixed + 3 * heads), *decay = q + mixed, *beta = decay + heads;
#pragma omp simd
    for (i64 e = 0; e < mixed; e++) {
      float slope, sum = u[e] * taps_of[e * taps + taps - 1];
      for (i64 j = 0; j < taps - 1; j++) sum += before[j * mixed + e] * taps_of[e * taps + j];
      q[e] = sum * sigmoid_of(sum, 0, &slope);
    }
    memmove(before, before + mixed, sizeof(float) * (taps - 2) * mixed);
    memcpy(before + (taps - 2) * mixed, u, sizeof(float) * mixed);
    for (i64 n = 0; n < heads; n++) {
      float wide = a[n] + decay_bias[n];
      decay[n] = -expf(decay_log[n]) * (wide > 20.0f ? wide : log1pf(expf(wide)));
      beta[n] = 1.0f / (1.0f + expf(-b[n]));
    }
    delta_token(q, q + key_width, q + 2 * key_width, decay, beta, held, held, out + r * inner, 1,
                key_heads, heads, width, values);
    gated_norm_forward(out + r * inner, gate, norm, out + r * inner, beta + heads, heads, values,
                       epsilon, is_sigmoid);
  }
  product(PLAIN, PLAIN, rows, channels, inner, 1.0f, out, inner, out_proj, channels, 0.0f, y);
}

/* Gradients of `attention_forward`; a task is a key head of a segment. Gradients are written, not
 * added, and rows that no task has are left. `room` has T * 2 * BLOCK * longest keys floats. */
void attention_backward(const float *q, const float *k, const float *v, const float *out,
                        const float *statistics, const float *grad, float *grad_q, float *grad_k,
                        float *grad_v, const Segment *segments, i64 num_segments, i64 query_heads,
                        i64 key_heads, i64 width, float scale, int causal, const float *key_bias,
                        const uint8_t *visible, const int32_t *ends, i64 mask_keys, float hidden,
                        float *room, i64 room_size) {
  i64 groups = query_heads / key_heads, query_stride = query_heads * width;
  i64 key_stride = key_heads * width, num_tasks = num_segments * key_heads, next = 0;
#pragma omp parallel
  {
    float *powers = room + (size_t)omp_get_thread_num() * 2 * room_size;
    float *score_grad = powers + room_size;
    for (i64 task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < num_tasks;) {
      const Segment *s = segments + task / key_heads;
      i64 key_head = task % key_heads, blocks = (s->queries + BLOCK - 1) / BLOCK;
      const float *key = k + key_head * width, *value = v + key_head * width;
      float *to_key = grad_k + s->key * key_stride + key_head * width;
      float *to_value = grad_v + s->key * key_stride + key_head * width;
      float before = 0.0f;
      if (visible) {
        /* The last block may see fewer keys than the others. */
        for (i64 j = 0; j < s->keys; j++) {
          memset(to_key + j * key_stride, 0, sizeof(float) * width);
          memset(to_value + j * key_stride, 0, sizeof(float) * width);
        }
        before = 1.0f;
      }
      for (i64 g = 0; g < groups; g++) {
        i64 head = key_head * groups + g;
        /* Without a mask the last block sees all keys: its products set the sums that others add to. */
        for (i64 block = blocks - 1; block >= 0; block--) {
          i64 begin = block * BLOCK;
          i64 count = s->queries - begin < BLOCK ? s->queries - begin : BLOCK;
          i64 keys = seen_keys(s, begin, count, causal, ends);
          i64 first = (s->query + begin) * query_stride + head * width;
          if (keys == 0) {
            for (i64 r = 0; r < count; r++)
              memset(grad_q + first + r * query_stride, 0, sizeof(float) * width);
            continue;
          }
          score_rows(s, begin, count, keys, q + head * width, key, query_stride, key_stride, width,
                     scale, key_bias, visible, mask_keys, hidden, powers);
          cblas_sgemm(ROW_MAJOR, PLAIN, TRANSPOSED, count, keys, width, 1.0f, grad + first,
                      query_stride, value + s->key * key_stride, key_stride, 0.0f, score_grad, keys);
          for (i64 r = 0; r < count; r++) {
            float *p = powers + r * keys, *d = score_grad + r * keys, delta = 0.0f;
            const float *g_row = grad + first + r * query_stride;
            const float *o_row = out + first + r * query_stride;
            const float *kept = statistics + ((s->query + begin + r) * query_heads + head) * 2;
            i64 seen = causal ? keys - count + r + 1 : keys;
            float largest = kept[0], inverse = kept[1];
#pragma omp simd reduction(+ : delta)
            for (i64 j = 0; j < width; j++) delta += g_row[j] * o_row[j];
#pragma omp simd
            for (i64 j = 0; j < seen; j++) {
              float y = fast_exp(p[j] - largest) * inverse;
              p[j] = y;
              d[j] = y * (d[j] - delta);
            }
            memset(p + seen, 0, sizeof(float) * (keys - seen));
            memset(d + seen, 0, sizeof(float) * (keys - seen));
          }
          cblas_sgemm(ROW_MAJOR, TRANSPOSED, PLAIN, keys, width, count, 1.0f, powers, keys,
                      grad + first, query_stride, before, to_value, key_stride);
          cblas_sgemm(ROW_MAJOR, TRANSPOSED, PLAIN, keys, width, count, scale, score_grad, keys,
                      q + first, query_stride, before, to_key, key_stride);
          cblas_sgemm(ROW_MAJOR, PLAIN, PLAIN, count, width, keys, scale, score_grad, keys,
                      key + s->key * key_stride, key_stride, 0.0f, grad_q + first, query_stride);
          before = 1.0f;
        }
      }
    }
  }
}

/* ---- experts ---- */

/* Rows by the experts of each, `indices[N][K]` of E, summed with weights[N][K]: the MLPs of
 * gate_up[E][D][2 I] and down[E][I][D]. An expert's rows are taken together. `room` has
 * N K (2 D + 3 I) floats, `places` N K + E + 1 numbers. counts[E]: rows of each expert. */
void token_experts(const float *x, const i64 *indices, const float *weights, const float *gate_up,
                   const float *down, float *y, i64 *counts, i64 rows, i64 copies, i64 experts, i64 width,
                   i64 inner, float *room, i64 *places) {
  i64 total = rows * copies, *ends = places + total;
  float *halves = room + total * width, *gated = halves + total * 2 * inner;
  float *out = gated + total * inner;
  memset(ends, 0, sizeof(i64) * (experts + 1));
  for (i64 n = 0; n < total; n++) ends[indices[n] + 1]++;
  for (i64 e = 0; e < experts; e++) ends[e + 1] += ends[e];
  for (i64 n = 0; n < total; n++) {
    i64 place = places[n] = ends[indices[n]]++;
    memcpy(room + place * width, x + n / copies * width, sizeof(float) * width);
  }
  /* Now ends[e] is where the rows of expert e end. */
#pragma omp parallel for schedule(static, 1)
  for (i64 e = 0; e < experts; e++) {
    i64 begin = e ? ends[e - 1] : 0, count = counts[e] = ends[e] - begin;
    if (!count) continue;
    float *h = halves + begin * 2 * inner, *g = gated + begin * inner;
    product(PLAIN, PLAIN, count, 2 * inner, width, 1.0f, room + begin * width, width,
            gate_up + e * width * 2 * inner, 2 * inner, 0.0f, h);
    for (i64 i = 0; i < count; i++)
      gated_row(h + i * 2 * inner, h + i * 2 * inner + inner, g + i * inner, inner, 0);
    product(PLAIN, PLAIN, count, width, inner, 1.0f, g, inner, down + e * inner * width, width, 0.0f,
            out + begin * width);
  }
#pragma omp parallel for schedule(static) if (rows > 1)
  for (i64 r = 0; r < rows; r++) {
    float *o = y + r * width;
    for (i64 k = 0; k < copies; k++) {
      const float *a = out + places[r * copies + k] * width;
      float w = weights[r * copies + k];
#pragma omp simd
      for (i64 j = 0; j < width; j++) o[j] = (k ? o[j] : 0.0f) + w * a[j];
    }
  }
}

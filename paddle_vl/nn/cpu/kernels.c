/* Kernels for the CPU in float32: rotary embedding, attention, norms, dropout, GELU's tanh form
 * and gated units.
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
enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };

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

/* ---- norms ---- */

/* y = (x - mean) / deviation * (offset + weight) + bias. Without `centres` the mean is 0; without a
 * weight the factor is 1. statistics[N][2]: mean and inverse deviation. */
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
    statistics[2 * i] = mean;
    statistics[2 * i + 1] = inverse;
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

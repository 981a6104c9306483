/* Attention of queries that choose to blocks of their sample's tokens, and the choice: see
 * paddle_vl/nn/block_attention.py, whose letters are used here. Compiled behind kernels.c, as one
 * source with it.
 *
 * Keys are read where they lie, R[key heads][H], tokens of a block side by side. Nothing is computed
 * of tokens that a query does not see. Each sum has one order, whatever the number of threads.
 */

/* A vector of the processor, and rows that are summed at a time: as many as registers hold. */
#ifdef __AVX512F__
enum { WIDE = 16, ROWS = 4 };
#else
enum { WIDE = 8, ROWS = 2 };
#endif
typedef float Wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
enum { COLUMNS = 4, TOKENS = 4, TASK = 8 };  /* vectors and keys at a time; queries of a task */

/* Consecutive queries of a sample: number of the first among those that choose, how many, row of the
 * first, its place, and row of the sample's first key. */
typedef struct {
  i64 number, count, query, place, key;
} Choosing;

/* Tokens that a query sees: those of its blocks, then from `tail` on. */
typedef struct {
  const int32_t *chosen;
  uint32_t size, of_blocks, seen;
  i64 tail;
} Seen;

static inline Seen seen_by(const int32_t *chosen, i64 num_chosen, i64 size, i64 place) {
  i64 tail = (place + 1) / size * size, of_blocks = num_chosen * size;
  return (Seen){chosen, size, of_blocks, of_blocks + place + 1 - tail, tail};
}

/* Rows of `count` tokens from the j-th one on, or of the last one behind it; later ones are fetched
 * into the cache. */
static inline void rows_of(const float *x, i64 stride, const Seen *s, uint32_t j, int count,
                           i64 width, const float **rows) {
  for (int n = 0; n < count; n++) {
    uint32_t own = j + n < s->seen ? j + n : s->seen - 1;
    uint32_t far = own + KEY_BLOCK < s->of_blocks ? own + KEY_BLOCK : own;
    i64 token = own < s->of_blocks ? (i64)s->chosen[own / s->size] * s->size + own % s->size
                                   : s->tail + own - s->of_blocks;
    rows[n] = x + token * stride;
    if (far >= s->of_blocks) continue;
    const float *later = x + ((i64)s->chosen[far / s->size] * s->size + far % s->size) * stride;
    for (i64 i = 0; i < width; i += 16) __builtin_prefetch(later + i);
  }
}

/* A row of `TOKENS` numbers. */
typedef float Few __attribute__((vector_size(16), aligned(4), may_alias));

static inline __attribute__((always_inline)) Lanes halves(Wide x) {
  const Lanes *half = (const Lanes *)&x;
  Lanes sum = half[0];
  if (WIDE == 16) sum += half[WIDE / 8 - 1];
  return sum;
}

/* y[r][n] = scale * x[r] . key[n]; rows of y have `step` numbers. */
static inline __attribute__((always_inline)) void products_of(int rows, const float *x,
                                                              const float *const *key, i64 width,
                                                              float scale, float *y, i64 step) {
  Wide s[ROWS][TOKENS] = {{{0.0f}}};
  i64 i = 0;
  for (; i + WIDE <= width; i += WIDE) {
    Wide own[TOKENS];
    for (int n = 0; n < TOKENS; n++) own[n] = *(const Wide *)(key[n] + i);
    for (int r = 0; r < rows; r++) {
      Wide of_row = *(const Wide *)(x + r * width + i);
      for (int n = 0; n < TOKENS; n++) s[r][n] += of_row * own[n];
    }
  }
  for (int r = 0; r < rows; r++) {
    Lanes a = sums_of_pairs(halves(s[r][0]), halves(s[r][1]));
    a = sums_of_pairs(a, sums_of_pairs(halves(s[r][2]), halves(s[r][3])));
    const Few *half = (const Few *)&a;
    Few sum = half[0] + half[1];
    for (i64 h = i; h < width; h++)
      for (int n = 0; n < TOKENS; n++) sum[n] += x[r * width + h] * key[n][h];
    *(Few *)(y + r * step) = scale * sum;
  }
}

static inline __attribute__((always_inline)) void add_columns(int rows, int columns, const float *w,
                                                              i64 row_step, i64 step,
                                                              const float *const *x, i64 first,
                                                              i64 count, i64 width, float *y) {
  Wide s[ROWS][COLUMNS];
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < columns; n++) s[r][n] = *(Wide *)(y + r * width + first + WIDE * n);
  for (i64 j = 0; j < count; j++) {
    Wide own[COLUMNS];
    for (int n = 0; n < columns; n++) own[n] = *(const Wide *)(x[j] + first + WIDE * n);
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < columns; n++) s[r][n] += w[r * row_step + j * step] * own[n];
  }
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < columns; n++) *(Wide *)(y + r * width + first + WIDE * n) = s[r][n];
}

/* y[r] += sum over j of w[r][j] x[j]; w[r][j] lies at r * row_step + j * step, rows of y at r * y_step. */
static inline __attribute__((always_inline)) void add_rows(int rows, const float *w, i64 row_step,
                                                           i64 step, const float *const *x,
                                                           i64 count, i64 width, float *y,
                                                           i64 y_step) {
  i64 i = 0;
  for (; i + WIDE * COLUMNS <= width; i += WIDE * COLUMNS)
    add_columns(rows, COLUMNS, w, row_step, step, x, i, count, y_step, y);
  for (; i + WIDE <= width; i += WIDE)
    add_columns(rows, 1, w, row_step, step, x, i, count, y_step, y);
  for (; i < width; i++)
    for (int r = 0; r < rows; r++)
      for (i64 j = 0; j < count; j++) y[r * y_step + i] += w[r * row_step + j * step] * x[j][i];
}

static void products(i64 rows, const float *x, const float *const *key, i64 width, float scale,
                     float *y, i64 step) {
  for (; rows >= ROWS; rows -= ROWS, x += ROWS * width, y += ROWS * step)
    products_of(ROWS, x, key, width, scale, y, step);
  for (; rows > 0; rows--, x += width, y += step) products_of(1, x, key, width, scale, y, step);
}

static void add_products(i64 rows, const float *w, i64 row_step, i64 step, const float *const *x,
                         i64 count, i64 width, float *y, i64 y_step) {
  for (; rows >= ROWS; rows -= ROWS, w += ROWS * row_step, y += ROWS * y_step)
    add_rows(ROWS, w, row_step, step, x, count, width, y, y_step);
  for (; rows > 0; rows--, w += row_step, y += y_step)
    add_rows(1, w, row_step, step, x, count, width, y, y_step);
}

/* Attention [Q][N][H], and the logarithm of the sum of exponentials of every query and head. `room`
 * has T * G * step numbers, `step` being P rounded up to `TOKENS`. */
void chosen_attention_forward(const float *q, const float *k, const float *v, const int32_t *chosen,
                              float *out, float *logsums, const Choosing *parts, i64 num_parts,
                              i64 heads, i64 key_heads, i64 width, i64 num_chosen, i64 size,
                              float scale, float *room, i64 step) {
  i64 groups = heads / key_heads, stride = key_heads * width;
  for (i64 n = 0; n < num_parts; n++) {
    const Choosing *part = parts + n;
    i64 tasks = (part->count + TASK - 1) / TASK, next = 0;
#pragma omp parallel
    {
      float *scores = room + (size_t)omp_get_thread_num() * groups * step;
      for (i64 task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks * key_heads;) {
        /* Queries of a task follow one another: many of their blocks are the same ones. */
        i64 begin = task % tasks * TASK, head = task / tasks;
        i64 end = begin + TASK < part->count ? begin + TASK : part->count;
        const float *key = k + part->key * stride + head * width;
        const float *value = v + part->key * stride + head * width;
        for (i64 i = begin; i < end; i++) {
          i64 first = (part->number + i) * heads + head * groups;
          const float *query = q + ((part->query + i) * heads + head * groups) * width;
          float *result = out + first * width;
          const float *own[KEY_BLOCK];
          Seen s = seen_by(chosen + (part->number + i) * num_chosen, num_chosen, size,
                           part->place + i);
          for (uint32_t j = 0; j < s.seen; j += TOKENS) {
            rows_of(key, stride, &s, j, TOKENS, width, own);
            products(groups, query, own, width, scale, scores + j, step);
          }
          float inverse[groups];
          for (i64 g = 0; g < groups; g++) {
            float *row = scores + g * step, largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
            for (i64 j = 0; j < s.seen; j++) largest = row[j] > largest ? row[j] : largest;
#pragma omp simd reduction(+ : sum)
            for (i64 j = 0; j < s.seen; j++) {
              row[j] = fast_exp(row[j] - largest);
              sum += row[j];
            }
            inverse[g] = 1.0f / sum;
            logsums[first + g] = largest + logf(sum);
          }
          memset(result, 0, sizeof(float) * groups * width);
          for (uint32_t j = 0; j < s.seen; j += KEY_BLOCK) {
            int count = s.seen - j < KEY_BLOCK ? s.seen - j : KEY_BLOCK;
            rows_of(value, stride, &s, j, count, width, own);
            add_products(groups, scores + j, step, 1, own, count, width, result, width);
          }
          for (i64 g = 0; g < groups; g++)
            for (i64 h = 0; h < width; h++) result[g * width + h] *= inverse[g];
        }
      }
    }
  }
}

/* Probabilities and gradients of the scores of one query and key head, [G][step] each; and the
 * gradient of the query. */
static void query_gradient(const float *query, const float *key, const float *value,
                           const float *out, const float *logsums, const float *grad, float *grad_q,
                           const Seen *s, i64 groups, i64 stride, i64 width, float scale,
                           float *powers, float *score_grad, i64 step) {
  float delta[groups];
  for (i64 g = 0; g < groups; g++) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (i64 h = 0; h < width; h++) sum += out[g * width + h] * grad[g * width + h];
    delta[g] = sum;
  }
  memset(grad_q, 0, sizeof(float) * groups * width);
  for (uint32_t j = 0; j < s->seen; j += KEY_BLOCK) {
    int count = s->seen - j < KEY_BLOCK ? s->seen - j : KEY_BLOCK;
    int most = (count + TOKENS - 1) / TOKENS * TOKENS;
    const float *keys[KEY_BLOCK], *values[KEY_BLOCK];
    rows_of(key, stride, s, j, most, width, keys);
    rows_of(value, stride, s, j, most, width, values);
    for (int n = 0; n < count; n += TOKENS) {
      products(groups, query, keys + n, width, scale, powers + j + n, step);
      products(groups, grad, values + n, width, 1.0f, score_grad + j + n, step);
    }
    for (i64 g = 0; g < groups; g++) {
      float *p = powers + g * step + j, *d = score_grad + g * step + j, logsum = logsums[g];
#pragma omp simd
      for (int n = 0; n < count; n++) {
        p[n] = fast_exp(p[n] - logsum);
        d[n] = scale * p[n] * (d[n] - delta[g]);
      }
    }
    add_products(groups, score_grad + j, step, 1, keys, count, width, grad_q, width);
  }
}

/* Lists by block what queries of a part see of it, in the order of the queries: query * (J + 1) plus
 * the number of the block among those that it chose, J for its tail. Block b has those from
 * begins[b] to begins[b + 1]. */
static void list_by_block(const Choosing *part, const int32_t *chosen, i64 num_chosen, i64 size,
                          i64 blocks, int32_t *begins, int32_t *listed) {
  memset(begins, 0, sizeof(int32_t) * (blocks + 2));
  /* First counts two places behind, then ends one place behind. */
  for (int fills = 0; fills < 2; fills++) {
    for (i64 i = 0; i < part->count; i++) {
      for (i64 n = 0; n <= num_chosen; n++) {
        i64 seen = part->place + i + 1;
        if (n == num_chosen && seen % size == 0) continue;
        i64 block = n < num_chosen ? chosen[i * num_chosen + n] : seen / size;
        if (fills) listed[begins[block + 1]++] = i * (num_chosen + 1) + n;
        else begins[block + 2]++;
      }
    }
    for (i64 b = 0; b < blocks && !fills; b++) begins[b + 2] += begins[b + 1];
  }
}

/* Gradients of `chosen_attention_forward`, added to those of keys and values. First each query of a
 * chunk, then each block: a thread adds up what all of these queries give to a block's tokens.
 * `room` has 2 * chunk * G * step numbers; `listed` chunk * (J + 1), `begins` the blocks of the longest
 * sample plus three. */
void chosen_attention_backward(const float *q, const float *k, const float *v,
                               const int32_t *chosen, const float *out, const float *logsums,
                               const float *grad, float *grad_q, float *grad_k, float *grad_v,
                               const Choosing *parts, i64 num_parts, i64 heads, i64 key_heads,
                               i64 width, i64 num_chosen, i64 size, float scale, i64 chunk,
                               float *room, i64 step, int32_t *begins, int32_t *listed) {
  i64 groups = heads / key_heads, stride = key_heads * width, of_query = groups * step;
  float *powers = room, *score_grads = room + chunk * of_query;
  for (i64 n = 0; n < num_parts; n++) {
    for (i64 done = 0; done < parts[n].count; done += chunk) {
      Choosing part = parts[n];
      part.number += done, part.query += done, part.place += done;
      part.count = part.count - done < chunk ? part.count - done : chunk;
      const int32_t *of_part = chosen + part.number * num_chosen;
      i64 blocks = (part.place + part.count) / size + 1;
      list_by_block(&part, of_part, num_chosen, size, blocks, begins, listed);
      for (i64 head = 0; head < key_heads; head++) {
        i64 first_key = part.key * stride + head * width, next_query = 0, next_block = 0;
        i64 first_out = (part.number * heads + head * groups) * width;
        const float *query = q + (part.query * heads + head * groups) * width;
#pragma omp parallel
        for (i64 i; (i = __atomic_fetch_add(&next_query, 1, __ATOMIC_RELAXED)) < part.count;) {
          Seen s = seen_by(of_part + i * num_chosen, num_chosen, size, part.place + i);
          i64 row = i * heads * width;
          query_gradient(query + row, k + first_key, v + first_key, out + first_out + row,
                         logsums + (part.number + i) * heads + head * groups,
                         grad + first_out + row,
                         grad_q + (part.query * heads + head * groups) * width + row, &s, groups,
                         stride, width, scale, powers + i * of_query, score_grads + i * of_query,
                         step);
        }
#pragma omp parallel
        for (i64 b; (b = __atomic_fetch_add(&next_block, TASK, __ATOMIC_RELAXED)) < blocks;) {
          i64 end = begins[b + TASK < blocks ? b + TASK : blocks];
          for (i64 block = b; begins[block] < end; block++) {
            float *to_key = grad_k + first_key + block * size * stride;
            float *to_value = grad_v + first_key + block * size * stride;
            for (i64 m = begins[block]; m < begins[block + 1]; m++) {
              i64 i = listed[m] / (num_chosen + 1), own = listed[m] % (num_chosen + 1);
              i64 count = own < num_chosen ? size : (part.place + i + 1) % size;
              i64 at = i * of_query + own * size;
              const float *rows[groups], *grads[groups];
              for (i64 g = 0; g < groups; g++) {
                rows[g] = query + (i * heads + g) * width;
                grads[g] = grad + first_out + (i * heads + g) * width;
              }
              add_products(count, score_grads + at, 1, step, rows, groups, width, to_key, stride);
              add_products(count, powers + at, 1, step, grads, groups, width, to_value, stride);
            }
          }
        }
      }
    }
  }
}

/* The `num_chosen` best of the first blocks of each row, ascending; among equal scores the lowest
 * numbers. Row i has (place + i + 1) / size complete blocks. Scores are not negative, so their bits
 * are in the order of the numbers. */
void best_blocks(const uint32_t *scores, i64 rows, i64 blocks, i64 place, i64 size, i64 num_chosen,
                 int32_t *best) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < rows; i++) {
    const uint32_t *row = scores + i * blocks;
    i64 complete = (place + i + 1) / size, missing = num_chosen, found = 0;
    complete = complete < blocks ? complete : blocks;
    /* The bits of the last one that is chosen, from the highest ones on. */
    uint32_t known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      i64 counts[256] = {0};
      uint32_t mask = shift == 24 ? 0 : ~0u << (shift + 8), digit = 255;
      for (i64 j = 0; j < complete; j++)
        counts[row[j] >> shift & 255] += (row[j] & mask) == known;
      for (; counts[digit] < missing; digit--) missing -= counts[digit];
      known |= digit << shift;
    }
    /* `missing` of those that are equal to it are chosen. */
    for (i64 j = 0; j < complete && found < num_chosen; j++) {
      int is_equal = row[j] == known;
      best[i * num_chosen + found] = j;
      found += row[j] > known || (is_equal && missing > 0);
      missing -= is_equal;
    }
  }
}

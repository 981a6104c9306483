/* Residual streams; letters of paddle_vl/nn/residual_streams.py: stream s of S is channels s D to
 * (s + 1) D - 1 of C, R rank of the gates. Rows are taken `most` at a time, which stay in the cache;
 * `room` has `room_size` floats for each thread. It follows kernels.c. */

/* x / sqrt(mean(x^2) + epsilon) * (1 + norm) of each stream; inverses[N][S]: 1 / that root. */
static void norm_streams(const float *x, const float *norm, float *y, float *inverses, i64 rows,
                         i64 streams, i64 width, float epsilon) {
  for (i64 i = 0; i < rows * streams; i++) {
    const float *a = x + i * width, *w = norm + i % streams * width;
    float *o = y + i * width, square = 0.0f;
#pragma omp simd reduction(+ : square)
    for (i64 j = 0; j < width; j++) square += a[j] * a[j];
    float inverse = inverses[i] = 1.0f / sqrtf(square / width + epsilon);
#pragma omp simd
    for (i64 j = 0; j < width; j++) o[j] = a[j] * inverse * (1.0f + w[j]);
  }
}

/* The gates' logits of rows whose low[N][R] is known; mixed[N][R] is its SiLU, slopes[N][R] that of
 * SiLU. */
static void gate_logits(const float *low, const float *up, float *mixed, float *slopes, float *logits,
                        i64 rows, i64 channels, i64 rank) {
#pragma omp simd
  for (i64 j = 0; j < rows * rank; j++) {
    float slope, value = low[j];
    mixed[j] = value * sigmoid_of(value, 0, &slope);
    slopes[j] = slope;
  }
  product(PLAIN, PLAIN, rows, channels, rank, 1.0f, mixed, rank, up, channels, 0.0f, logits);
}

/* read[N][D] and, with `inject`, writes[N][S]; low[N][R] is kept for the backward pass, or NULL. */
void read_streams_forward(const float *x, const float *norm, const float *down, const float *up,
                          const float *inject, float *read, float *writes, float *low, i64 rows,
                          i64 streams, i64 width, i64 rank, float epsilon, i64 most, float *room,
                          i64 room_size) {
  i64 channels = streams * width;
#pragma omp parallel for schedule(static) if (rows > most)
  for (i64 begin = 0; begin < rows; begin += most) {
    i64 count = rows - begin < most ? rows - begin : most;
    float *u = room + (rows > most ? omp_get_thread_num() * room_size : 0);
    float *logits = u + count * channels, *mixed = logits + count * channels;
    float *slopes = mixed + count * rank, *inverses = slopes + count * rank;
    float *scaled = low ? low + begin * rank : inverses + count * streams;
    norm_streams(x + begin * channels, norm, u, inverses, count, streams, width, epsilon);
    product(PLAIN, PLAIN, count, rank, channels, 1.0f / streams, u, channels, down, rank, 0.0f,
            scaled);
    gate_logits(scaled, up, mixed, slopes, logits, count, channels, rank);
    for (i64 i = 0; i < count; i++) {
      float *o = read + (begin + i) * width;
      for (i64 s = 0; s < streams; s++) {
        const float *a = u + i * channels + s * width, *z = logits + i * channels + s * width;
#pragma omp simd
        for (i64 j = 0; j < width; j++)
          o[j] = (s ? o[j] : 0.0f) + a[j] / (1.0f + fast_exp(-z[j]));
      }
#pragma omp simd
      for (i64 j = 0; j < width; j++) o[j] /= streams;
    }
    if (inject) {
      float *w = writes + begin * streams;
      product(PLAIN, PLAIN, count, streams, channels, 1.0f / streams, u, channels, inject, streams,
              0.0f, w);
#pragma omp simd
      for (i64 j = 0; j < count * streams; j++) w[j] = 2.0f / (1.0f + fast_exp(-w[j]));
    }
  }
}

/* Gradients of `read_streams_forward`; those of weights may be NULL. The sums of the threads are added
 * in their order. */
void read_streams_backward(const float *x, const float *norm, const float *down, const float *up,
                           const float *inject, const float *low, const float *writes,
                           const float *grad_read, const float *grad_writes, float *grad_x,
                           float *grad_norm, float *grad_down, float *grad_up, float *grad_inject,
                           i64 rows, i64 streams, i64 width, i64 rank, float epsilon, i64 most,
                           float *room, i64 room_size) {
  i64 channels = streams * width;
  i64 sizes[4] = {channels, channels * rank, rank * channels, channels * streams};
  float *found[4] = {grad_norm, grad_down, grad_up, grad_inject};
  i64 summed = sizes[0] + sizes[1] + sizes[2] + sizes[3];
  int threads = omp_get_max_threads();
  for (int t = 0; t < threads; t++) memset(room + t * room_size, 0, sizeof(float) * summed);
#pragma omp parallel for schedule(static)
  for (i64 begin = 0; begin < rows; begin += most) {
    i64 count = rows - begin < most ? rows - begin : most;
    float *of_norm = room + omp_get_thread_num() * room_size, *of_down = of_norm + sizes[0];
    float *of_up = of_down + sizes[1], *of_inject = of_up + sizes[2], *u = of_inject + sizes[3];
    float *logits = u + count * channels, *grad_u = logits + count * channels;
    float *mixed = grad_u + count * channels, *slopes = mixed + count * rank;
    float *grad_low = slopes + count * rank, *inverses = grad_low + count * rank;
    float *grad_out = inverses + count * streams;
    const float *rows_x = x + begin * channels;
    norm_streams(rows_x, norm, u, inverses, count, streams, width, epsilon);
    gate_logits(low + begin * rank, up, mixed, slopes, logits, count, channels, rank);
    for (i64 i = 0; i < count * streams; i++) {
      const float *g = grad_read + (begin + i / streams) * width, *a = u + i * width;
      float *z = logits + i * width, *o = grad_u + i * width;
#pragma omp simd
      for (i64 j = 0; j < width; j++) {
        float gate = 1.0f / (1.0f + fast_exp(-z[j])), through = g[j] / streams * gate;
        o[j] = through;
        z[j] = through * a[j] * (1.0f - gate);
      }
    }
    if (grad_up)
      product(TRANSPOSED, PLAIN, rank, channels, count, 1.0f, mixed, rank, logits, channels, 1.0f,
              of_up);
    product(PLAIN, TRANSPOSED, count, rank, channels, 1.0f / streams, logits, channels, up, channels,
            0.0f, grad_low);
#pragma omp simd
    for (i64 j = 0; j < count * rank; j++) grad_low[j] *= slopes[j];
    product(PLAIN, TRANSPOSED, count, channels, rank, 1.0f, grad_low, rank, down, rank, 1.0f, grad_u);
    if (grad_down)
      product(TRANSPOSED, PLAIN, channels, rank, count, 1.0f, u, channels, grad_low, rank, 1.0f,
              of_down);
    if (inject) {
#pragma omp simd
      for (i64 j = 0; j < count * streams; j++) {
        float half = 0.5f * writes[begin * streams + j];
        grad_out[j] = grad_writes[begin * streams + j] * half * (1.0f - half) * 2.0f / streams;
      }
      product(PLAIN, TRANSPOSED, count, channels, streams, 1.0f, grad_out, streams, inject, streams,
              1.0f, grad_u);
      if (grad_inject)
        product(TRANSPOSED, PLAIN, channels, streams, count, 1.0f, u, channels, grad_out, streams,
                1.0f, of_inject);
    }
    for (i64 i = 0; i < count * streams; i++) {
      const float *a = rows_x + i * width, *w = norm + i % streams * width, *g = grad_u + i * width;
      float *o = grad_x + begin * channels + i * width, *n = of_norm + i % streams * width;
      float inverse = inverses[i], along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (i64 j = 0; j < width; j++) {
        float standard = a[j] * inverse;
        n[j] += g[j] * standard;
        o[j] = g[j] * (1.0f + w[j]);
        along += o[j] * standard;
      }
      along /= width;
#pragma omp simd
      for (i64 j = 0; j < width; j++) o[j] = inverse * (o[j] - a[j] * inverse * along);
    }
  }
  for (i64 part = 0, begin = 0; part < 4; begin += sizes[part++]) {
    for (int t = 0; t < threads && found[part]; t++) {
      const float *of_thread = room + t * room_size + begin;
#pragma omp simd
      for (i64 j = 0; j < sizes[part]; j++)
        found[part][j] = (t ? found[part][j] : 0.0f) + of_thread[j];
    }
  }
}

/* x_s + weights_s * out of each stream s. */
void write_streams_forward(const float *x, const float *out, const float *weights, float *y, i64 rows,
                           i64 streams, i64 width) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < rows * streams; i++) {
    const float *a = x + i * width, *b = out + i / streams * width;
#pragma omp simd
    for (i64 j = 0; j < width; j++) y[i * width + j] = a[j] + weights[i] * b[j];
  }
}

/* Gradients of `out` and the weights; that of x is `grad` itself. */
void write_streams_backward(const float *out, const float *weights, const float *grad,
                            float *grad_out, float *grad_weights, i64 rows, i64 streams, i64 width) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < rows; i++) {
    const float *b = out + i * width;
    float *o = grad_out + i * width;
    for (i64 s = 0; s < streams; s++) {
      const float *g = grad + (i * streams + s) * width;
      float weight = weights[i * streams + s], along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (i64 j = 0; j < width; j++) {
        along += g[j] * b[j];
        o[j] = (s ? o[j] : 0.0f) + weight * g[j];
      }
      grad_weights[i * streams + s] = along;
    }
  }
}

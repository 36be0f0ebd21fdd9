// Vectors of kVectorBytes, exp, and the matrix product of the CPU kernels. Included once for each
// instruction set, inside its own namespace and after its #pragma GCC target.

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(alignof(T))));
  static constexpr int kLanes = kVectorBytes / sizeof(T);
};
template <typename T>
using Vector = typename VectorOf<T>::type;

template <typename T>
inline Vector<T> load(const T* p) {
  return *reinterpret_cast<const Vector<T>*>(p);
}
template <typename T>
inline void store(T* p, Vector<T> v) {
  *reinterpret_cast<Vector<T>*>(p) = v;
}

// C[m, n] (+)= A[m, k] B[k, n] over kRows rows and two vectors of columns, all held in registers.
// A is read by broadcast at a[row * a_row + k * a_col], so it may be transposed; B and C are
// row-major.
template <typename T, int kRows>
inline void micro_kernel(int64_t depth, const T* a, int64_t a_row, int64_t a_col, const T* b,
                         int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  constexpr int kLanes = VectorOf<T>::kLanes;
  Vector<T> acc[kRows][2];
  for (int i = 0; i < kRows; ++i) {
    acc[i][0] = accumulate ? load(c + i * ldc) : Vector<T>{};
    acc[i][1] = accumulate ? load(c + i * ldc + kLanes) : Vector<T>{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vector<T> b0 = load(b + k * ldb), b1 = load(b + k * ldb + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const T x = a[i * a_row + k * a_col];
      acc[i][0] += x * b0;
      acc[i][1] += x * b1;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    store(c + i * ldc, acc[i][0]);
    store(c + i * ldc + kLanes, acc[i][1]);
  }
}

// The whole product; rows and cols are rounded up to the micro-kernel, so buffers are padded.
template <typename T>
inline void multiply(int64_t rows, int64_t cols, int64_t depth, const T* a, int64_t a_row,
                     int64_t a_col, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  constexpr int kCols = 2 * VectorOf<T>::kLanes;
  for (int64_t n = 0; n < cols; n += kCols) {
    for (int64_t m = 0; m < rows; m += kMicroRows) {
      micro_kernel<T, kMicroRows>(depth, a + m * a_row, a_row, a_col, b + n, ldb, c + m * ldc + n,
                                  ldc, accumulate);
    }
  }
}

// exp, relative error 2 ulp: 2^n exp(r), |r| <= ln 2 / 2, degree-6 polynomial (Cephes expf). Below
// -87.3 the result is 0 (it would be subnormal); NaN stays NaN.
inline Vector<float> exp_vector(Vector<float> x) {
  typedef int32_t Ints __attribute__((vector_size(kVectorBytes), aligned(4)));
  constexpr float kRound =
      12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vector<float> biased = x * 1.44269504088896341f + kRound;
  const Vector<float> n = biased - kRound;
  const Vector<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector<float> y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.f;
  const Ints exponent = (Ints)biased << 23;  // n; the rest shifts out
  const Ints scaled = (Ints)y + exponent;
  y = (Vector<float>)scaled;
  y = x < -87.3f ? Vector<float>{} : y;
  return x == x ? y : x;
}

// p[j] = exp(s[j] - m) over n elements (a multiple of the vector), returns the sum.
inline float exp_row(float* s, float m, int64_t n) {
  Vector<float> sum = {};
  for (int64_t j = 0; j < n; j += VectorOf<float>::kLanes) {
    const Vector<float> p = exp_vector(load(s + j) - m);
    store(s + j, p);
    sum += p;
  }
  float total = 0.f;
  for (int i = 0; i < VectorOf<float>::kLanes; ++i) total += sum[i];
  return total;
}
inline double exp_row(double* s, double m, int64_t n) {
  double total = 0;
  for (int64_t j = 0; j < n; ++j) total += s[j] = std::exp(s[j] - m);
  return total;
}

template <typename T>
inline T max_row(const T* s, int64_t n) {
  Vector<T> best = load(s);
  for (int64_t j = VectorOf<T>::kLanes; j < n; j += VectorOf<T>::kLanes) {
    const Vector<T> x = load(s + j);
    best = x > best ? x : best;
  }
  T result = -std::numeric_limits<T>::infinity();
  for (int i = 0; i < VectorOf<T>::kLanes; ++i) result = best[i] > result ? best[i] : result;
  return result;
}

template <typename T>
inline void scale_row(T* x, T factor, int64_t n) {
  for (int64_t j = 0; j < n; ++j) x[j] *= factor;
}

// Loops over the cross entropy formula: a row at a time where its classes are neighbours, else rows side by side.
#include "loss.h"

#include <cmath>

#include "compiled.h"

namespace memkit::cpu {
namespace {

constexpr int kSums = 32;  // partial sums: GCC does not reorder floating-point additions, so the order is vectorisable
constexpr int64_t kBeside = 256;  // rows worked on side by side

// What rows and columns share: reading logits and targets.
template <class Lanes, class S>
struct Reader {
  using T = typename ComputeType<S>::type;
  const LossArgs& args;
  const Loss<T> op{args};

  MEMKIT_FN const S* x(int64_t i) const { return static_cast<const S*>(args.x) + i; }
  MEMKIT_FN S* out(int64_t i) const { return static_cast<S*>(args.out) + i; }
  MEMKIT_FN const T* weight() const { return static_cast<const T*>(args.weight); }
  MEMKIT_FN T weight(int64_t c) const { return args.weight ? weight()[c] : T(1); }
  MEMKIT_FN T* stored(void* numbers, int64_t row) const { return static_cast<T*>(numbers) + row; }

  // The values of at most a block of logits: where they lie, or widened and capped in `block`.
  MEMKIT_FN const T* read(const S* x, T* block, int64_t n) const {
    if constexpr (std::is_same_v<S, T>)
      if (args.cap == 0) return x;
    Lanes::widen(x, block, n);
    if (args.cap != 0) {
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) block[k] = op.capped(block[k]);
    }
    return block;
  }
  MEMKIT_FN T read(int64_t i) const {
    const T logit = to_compute(*x(i));
    return args.cap != 0 ? op.capped(logit) : logit;
  }

  // Whether all of b lies on the target's class.
  MEMKIT_FN bool one_class() const { return !args.probabilities && args.smoothing == 0; }
  // What of the gradient lies on an index target alone.
  MEMKIT_FN T hot(int64_t index) const { return op.kept * weight(index); }
  MEMKIT_FN bool ignored(int64_t row) const { return args.index && args.index[row] == args.ignore_index; }
  // The mass of b beside `hot`, for an index target.
  MEMKIT_FN T smooth_mass() const {
    if (args.smoothing == 0) return 0;
    return op.smooth * (args.weight ? *static_cast<const T*>(args.weight_sum) : T(args.classes));
  }

  MEMKIT_FN void probabilities(int64_t i, T* block, int64_t n) const {
    if (args.wide_probabilities)
      std::copy_n(static_cast<const T*>(args.probabilities) + i, n, block);
    else
      Lanes::widen(static_cast<const S*>(args.probabilities) + i, block, n);
  }

  MEMKIT_FN T grad(int64_t row) const {
    const T grad = static_cast<const T*>(args.grad)[args.grad_a_row ? row : 0];
    return args.total ? grad / *static_cast<const T*>(args.total) : grad;
  }
  MEMKIT_FN T slope(T x) const { return args.cap != 0 ? op.cap_slope(x) : T(1); }

  // grad (factor e^(x - largest) - b) slope, of a class whose x is at hand.
  MEMKIT_FN T gradient(T x, T largest, T factor, T b, T grad) const {
    return (exp_falling(x - largest) * factor - b) * grad * slope(x);
  }
};

template <class Lanes, class S>
struct Rows : Reader<Lanes, S> {
  using typename Reader<Lanes, S>::T;
  using Reader<Lanes, S>::args, Reader<Lanes, S>::op;

  // b of the classes [c, c + n), `hot` apart; element i is class c.
  MEMKIT_FN void shares(int64_t c, int64_t i, T* b, int64_t n) const {
    if (args.probabilities) {
      this->probabilities(i, b, n);
    } else {
      std::fill_n(b, n, T(0));
    }
    if (args.weight) {
      const T* w = this->weight() + c;
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) b[k] = op.share(b[k], w[k]);
    } else {
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) b[k] = op.share(b[k], T(1));
    }
  }

  MEMKIT_FN static T largest_of(const T* x, int64_t n, T so_far) {
    T most[kSums];
    std::fill_n(most, kSums, so_far);
    int64_t i = 0;
    for (; i + kSums <= n; i += kSums) {
      MEMKIT_LOOP
      for (int k = 0; k < kSums; ++k) most[k] = select(x[i + k] > most[k], x[i + k], most[k]);
    }
    for (; i < n; ++i) most[0] = select(x[i] > most[0], x[i], most[0]);
    for (T each : most) so_far = select(each > so_far, each, so_far);
    return so_far;
  }

  // Adds f(k) for k < n up.
  template <class F>
  MEMKIT_FN static void accumulate(T (&sums)[kSums], int64_t n, const F& f) {
    int64_t i = 0;
    for (; i + kSums <= n; i += kSums) {
      MEMKIT_LOOP
      for (int k = 0; k < kSums; ++k) sums[k] += f(i + k);
    }
    for (; i < n; ++i) sums[i % kSums] += f(i);
  }
  MEMKIT_FN static T total_of(T (&sums)[kSums]) {
    for (int half = kSums / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    return sums[0];
  }

  MEMKIT_FN void forward(int64_t row) const {
    if (this->ignored(row)) {
      *this->stored(args.loss, row) = *this->stored(args.factor, row) = *this->stored(args.largest, row) = 0;
      return;
    }
    const int64_t first = row * args.classes;
    T block[kBlock], b[kBlock];
    T largest = -std::numeric_limits<T>::infinity();
    for (int64_t c = 0; c < args.classes; c += kBlock) {
      const int64_t n = std::min(kBlock, args.classes - c);
      largest = largest_of(this->read(this->x(first + c), block, n), n, largest);
    }
    largest = op.pivot(largest);
    T sums[kSums] = {}, masses[kSums] = {}, dots[kSums] = {};
    for (int64_t c = 0; c < args.classes; c += kBlock) {
      const int64_t n = std::min(kBlock, args.classes - c);
      const T* x = this->read(this->x(first + c), block, n);
      accumulate(sums, n, [&](int64_t k) __attribute__((always_inline)) { return exp_falling(x[k] - largest); });
      if (this->one_class()) continue;
      shares(c, first + c, b, n);
      accumulate(dots, n, [&](int64_t k) __attribute__((always_inline)) { return b[k] * (x[k] - largest); });
      if (args.probabilities) accumulate(masses, n, [&](int64_t k) __attribute__((always_inline)) { return b[k]; });
    }
    const T sum = total_of(sums), log_sum = std::log(sum);
    T mass = total_of(masses), dot = total_of(dots);
    if (args.index) {
      const int64_t t = args.index[row];
      mass = this->hot(t) + this->smooth_mass();
      dot += this->hot(t) * (this->read(first + t) - largest);
    }
    *this->stored(args.loss, row) = op.loss(mass, dot, largest, log_sum);
    *this->stored(args.largest, row) = largest;
    *this->stored(args.factor, row) = op.factor(mass, sum, largest, log_sum);
  }

  MEMKIT_FN void backward(int64_t row) const {
    const int64_t first = row * args.classes;
    if (this->ignored(row)) {
      std::memset(static_cast<void*>(this->out(first)), 0, size_t(args.classes) * sizeof(S));
      return;
    }
    const T largest = *this->stored(args.largest, row), factor = *this->stored(args.factor, row);
    const T grad = this->grad(row), product = factor * grad;
    const int64_t t = args.index ? args.index[row] : 0;
    const T at_target = args.index ? this->read(first + t) : T(0);  // before it is overwritten
    T block[kBlock], b[kBlock], wide[kBlock];
    for (int64_t c = 0; c < args.classes; c += kBlock) {
      const int64_t n = std::min(kBlock, args.classes - c);
      const T* x = this->read(this->x(first + c), block, n);
      T* y = wide;
      if constexpr (std::is_same_v<S, T>) y = this->out(first + c);
      if (this->one_class() && args.cap == 0) {
        MEMKIT_LOOP
        for (int64_t k = 0; k < n; ++k) y[k] = exp_falling(x[k] - largest) * product;
      } else {
        shares(c, first + c, b, n);
        const bool capped = args.cap != 0;
        MEMKIT_LOOP
        for (int64_t k = 0; k < n; ++k) {
          const T g = (exp_falling(x[k] - largest) * factor - b[k]) * grad;
          y[k] = g * select(capped, op.cap_slope(x[k]), T(1));
        }
      }
      if constexpr (!std::is_same_v<S, T>) Lanes::narrow(wide, this->out(first + c), n);
    }
    if (args.index) {
      const T share = this->hot(t) + op.smooth * this->weight(t);
      from_compute(this->gradient(at_target, largest, factor, share, grad), *this->out(first + t));
    }
  }

  MEMKIT_FN static void run(LossPass pass, const LossArgs& args, int64_t begin, int64_t end) {
    const Rows rows{{args}};
    for (int64_t row = begin; row < end; ++row) {
      if (pass != LossPass::backward) rows.forward(row);
      if (pass != LossPass::forward) rows.backward(row);
    }
  }
};

// Classes lie `inner` apart, and neighbours belong to neighbouring rows: n rows of one outer index at a time.
template <class Lanes, class S>
struct Columns : Reader<Lanes, S> {
  using typename Reader<Lanes, S>::T;
  using Reader<Lanes, S>::args, Reader<Lanes, S>::op;

  MEMKIT_FN int64_t element(int64_t row, int64_t c) const {
    return (row / args.inner * args.classes + c) * args.inner + row % args.inner;
  }

  // b of class c in n rows, `hot` apart.
  MEMKIT_FN void shares(int64_t row, int64_t c, T* b, int64_t n) const {
    if (args.probabilities) {
      this->probabilities(element(row, c), b, n);
    } else {
      std::fill_n(b, n, T(0));
    }
    const T w = this->weight(c);
    MEMKIT_LOOP
    for (int64_t k = 0; k < n; ++k) b[k] = op.share(b[k], w);
  }

  MEMKIT_FN void forward(int64_t row, int64_t n) const {
    T block[kBeside], b[kBeside], largest[kBeside], sum[kBeside] = {}, mass[kBeside] = {}, dot[kBeside] = {};
    std::fill_n(largest, n, -std::numeric_limits<T>::infinity());
    for (int64_t c = 0; c < args.classes; ++c) {
      const T* x = this->read(this->x(element(row, c)), block, n);
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) largest[k] = select(x[k] > largest[k], x[k], largest[k]);
    }
    for (int64_t k = 0; k < n; ++k) largest[k] = op.pivot(largest[k]);
    for (int64_t c = 0; c < args.classes; ++c) {
      const T* x = this->read(this->x(element(row, c)), block, n);
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) sum[k] += exp_falling(x[k] - largest[k]);
      if (this->one_class()) continue;
      shares(row, c, b, n);
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) {
        dot[k] += b[k] * (x[k] - largest[k]);
        mass[k] += b[k];
      }
    }
    for (int64_t k = 0; k < n; ++k) {
      const bool ignored = this->ignored(row + k);
      if (args.index && !ignored) {
        const int64_t t = args.index[row + k];
        mass[k] = this->hot(t) + this->smooth_mass();
        dot[k] += this->hot(t) * (this->read(element(row + k, t)) - largest[k]);
      }
      const T log_sum = std::log(sum[k]);
      *this->stored(args.loss, row + k) = ignored ? T(0) : op.loss(mass[k], dot[k], largest[k], log_sum);
      *this->stored(args.largest, row + k) = largest[k];
      *this->stored(args.factor, row + k) = ignored ? T(0) : op.factor(mass[k], sum[k], largest[k], log_sum);
    }
  }

  MEMKIT_FN void backward(int64_t row, int64_t n) const {
    T block[kBeside], b[kBeside], wide[kBeside], grad[kBeside], at_target[kBeside];
    const T* largest = this->stored(args.largest, row);
    const T* factor = this->stored(args.factor, row);
    for (int64_t k = 0; k < n; ++k) {
      const bool ignored = this->ignored(row + k);
      grad[k] = ignored ? T(0) : this->grad(row + k);
      if (args.index && !ignored) at_target[k] = this->read(element(row + k, args.index[row + k]));
    }
    const bool capped = args.cap != 0;
    for (int64_t c = 0; c < args.classes; ++c) {
      const T* x = this->read(this->x(element(row, c)), block, n);
      shares(row, c, b, n);
      T* y = wide;
      if constexpr (std::is_same_v<S, T>) y = this->out(element(row, c));
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) {
        const T g = (exp_falling(x[k] - largest[k]) * factor[k] - b[k]) * grad[k];
        y[k] = g * select(capped, op.cap_slope(x[k]), T(1));
      }
      if constexpr (!std::is_same_v<S, T>) Lanes::narrow(wide, this->out(element(row, c)), n);
    }
    if (!args.index) return;
    for (int64_t k = 0; k < n; ++k) {
      const int64_t t = args.index[row + k];
      if (t == args.ignore_index) {
        for (int64_t c = 0; c < args.classes; ++c) *this->out(element(row + k, c)) = S{};  // a NaN times 0 is none
      } else {
        const T share = this->hot(t) + op.smooth * this->weight(t);
        from_compute(this->gradient(at_target[k], largest[k], factor[k], share, grad[k]),
                     *this->out(element(row + k, t)));
      }
    }
  }

  MEMKIT_FN static void run(LossPass pass, const LossArgs& args, int64_t begin, int64_t end) {
    const Columns columns{{args}};
    while (begin < end) {
      const int64_t n = std::min({kBeside, args.inner - begin % args.inner, end - begin});
      if (pass != LossPass::backward) columns.forward(begin, n);
      if (pass != LossPass::forward) columns.backward(begin, n);
      begin += n;
    }
  }
};

template <template <class, class> class Walk>
struct Body {
  template <class Lanes>
  struct Of {
    MEMKIT_FN static void run(LossPass pass, const LossArgs& args, int64_t begin, int64_t end) {
      switch (args.dtype) {
        case Dtype::float32: return Walk<Lanes, float>::run(pass, args, begin, end);
        case Dtype::float64: return Walk<Lanes, double>::run(pass, args, begin, end);
        case Dtype::float16: return Walk<Lanes, Half>::run(pass, args, begin, end);
        case Dtype::bfloat16: return Walk<Lanes, Bfloat>::run(pass, args, begin, end);
      }
    }
  };
};

}  // namespace

void cross_entropy(LossPass pass, const LossArgs& args, int64_t begin, int64_t end) {
  if (args.inner == 1)
    Compiled<Body<Rows>::Of>::run(pass, args, begin, end);
  else
    Compiled<Body<Columns>::Of>::run(pass, args, begin, end);
}

}  // namespace memkit::cpu

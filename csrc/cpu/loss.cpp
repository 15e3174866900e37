// Loops over the cross entropy formula: a row at a time where its classes are neighbours, else rows side by side.
#include "loss.h"

#include <cmath>
#include <cstring>

#include "reductions.h"

namespace memkit::cpu {
namespace {

constexpr int64_t kBeside = kBlock;  // rows worked on side by side: runs of memory long enough to be fetched ahead

// What rows and columns share: reading logits and targets, which are computed in T.
template <class Lanes, class T>
struct Reader {
  const LossArgs& args;
  const Loss<T> op{args};

  MEMKIT_FN const T* weight() const { return static_cast<const T*>(args.weight); }
  MEMKIT_FN T weight(int64_t c) const { return args.weight ? weight()[c] : T(1); }
  MEMKIT_FN T* stored(void* numbers, int64_t row) const { return static_cast<T*>(numbers) + row; }

  // The values of at most a block of logits: where they lie, or widened and capped in `block`.
  MEMKIT_FN const T* logits(int64_t i, T* block, int64_t n) const {
    const T* x = read<Lanes>(args.x, args.dtype, i, n, block);
    if (args.cap == 0) return x;
    MEMKIT_LOOP
    for (int64_t k = 0; k < n; ++k) block[k] = op.capped(x[k]);
    return block;
  }
  MEMKIT_FN T logit(int64_t i) const {
    T space;
    const T logit = *read<Lanes>(args.x, args.dtype, i, 1, &space);
    return args.cap != 0 ? op.capped(logit) : logit;
  }
  MEMKIT_FN void write(T value, int64_t i) const {
    *place(args.out, args.dtype, i, &value) = value;
    written<Lanes>(&value, args.out, args.dtype, i, 1);
  }
  MEMKIT_FN void clear(int64_t i, int64_t n) const {
    std::memset(static_cast<char*>(args.out) + i * size_of(args.dtype), 0, n * size_of(args.dtype));
  }

  // What of the gradient lies on an index target alone.
  MEMKIT_FN T hot(int64_t index) const { return op.kept * weight(index); }
  MEMKIT_FN bool ignored(int64_t row) const { return args.ignores(args.index_of(row)); }

  MEMKIT_FN void probabilities(int64_t i, T* block, int64_t n) const {
    const Dtype dtype = args.wide_probabilities ? Dtype::float32 : args.dtype;
    const T* from = read<Lanes>(args.probabilities, dtype, i, n, block);
    if (from != block) std::copy_n(from, n, block);
  }

  MEMKIT_FN T grad(int64_t row) const {
    const T grad = args.grad ? static_cast<const T*>(args.grad)[args.grad_a_row ? row : 0] : T(args.constant_grad);
    return args.total ? grad / *static_cast<const T*>(args.total) : grad;
  }
  MEMKIT_FN T slope(T x) const { return args.cap != 0 ? op.cap_slope(x) : T(1); }

  // Writes down what the sums over a row's classes come to; class c lies at first + c step.
  MEMKIT_FN void finish(int64_t row, int64_t first, int64_t step, T largest, T sum, T mass, T dot) const {
    const bool counts = !ignored(row);
    if (args.index && counts) {
      const int64_t t = args.index[row];
      mass = hot(t) + op.smooth_mass(args);
      dot += hot(t) * (logit(first + t * step) - largest);
    }
    const T log_sum = std::log(sum);
    *stored(args.loss, row) = counts ? op.loss(mass, dot, largest, log_sum) : T(0);
    *stored(args.largest, row) = largest;
    *stored(args.factor, row) = counts ? op.factor(mass, sum, largest, log_sum) : T(0);
  }

  // A row's gradient where it depends on the target index, beyond what that of every class is.
  MEMKIT_FN void finish_gradient(int64_t row, int64_t first, int64_t step, T at_target) const {
    const int64_t t = args.index[row];
    if (t == args.ignore_index) {
      for (int64_t c = 0; c < args.classes; ++c) clear(first + c * step, 1);  // a NaN times 0 is none
      return;
    }
    const T below = at_target - *stored(args.largest, row), factor = *stored(args.factor, row);
    const T share = hot(t) + op.smooth * weight(t);
    write((exp_falling(below) * factor - share) * grad(row) * slope(at_target), first + t * step);
  }
};

template <class Lanes, class T>
struct Rows : Reader<Lanes, T> {
  using Reader<Lanes, T>::args, Reader<Lanes, T>::op;

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

  // Neighbouring rows that fit a block together, or one longer row: one step for all of them, then the next, so that the
  // reductions of short rows overlap.
  MEMKIT_FN void forward(int64_t row, int64_t count, bool last) const {
    const int64_t first = row * args.classes, ahead = last ? 0 : count * args.classes;
    T block[kBlock], b[kBlock], largest[kBlock], sum[kBlock], mass[kBlock], dot[kBlock];
    std::fill_n(largest, count, -std::numeric_limits<T>::infinity());
    for (T* each : {sum, mass, dot}) std::fill_n(each, count, T(0));
    const T* x = nullptr;
    for (int64_t c = 0; c < args.classes; c += kBlock) {
      const int64_t n = part(c);
      x = this->logits(first + c, block, count * n);
      for (int64_t r = 0; r < count; ++r) largest[r] = largest_of<Lanes>(x + r * n, n, largest[r]);
    }
    for (int64_t r = 0; r < count; ++r) largest[r] = op.pivot(largest[r]);
    for (int64_t c = 0; c < args.classes; c += kBlock) {
      const int64_t n = part(c);
      if (args.classes > kBlock) x = this->logits(first + c, block, n);
      for (int64_t r = 0; r < count; ++r) {
        const T *own = x + r * n, most = largest[r];
        sum[r] += sum_with<Lanes, T>(
            n, asks_for<Lanes>(own, ahead),
            [&](int64_t, bool here, T x) MEMKIT_INLINE { return select(here, exp_falling(x - most), T(0)); }, own);
      }
      if (args.one_class()) continue;
      for (int64_t r = 0; r < count; ++r) {
        const T *own = x + r * n, most = largest[r];
        shares(c, first + r * n + c, b, n);
        dot[r] += sum_of<Lanes, T>(
            n, [&](int64_t, bool here, T b, T x) MEMKIT_INLINE { return b * select(here, x - most, T(0)); }, b, own);
        if (args.probabilities) mass[r] += sum_of<Lanes, T>(n, [](int64_t, bool, T b) MEMKIT_INLINE { return b; }, b);
      }
    }
    for (int64_t r = 0; r < count; ++r)
      this->finish(row + r, first + r * args.classes, 1, largest[r], sum[r], mass[r], dot[r]);
  }

  MEMKIT_FN void backward(int64_t row, int64_t count) const {
    const int64_t first = row * args.classes;
    T block[kBlock], b[kBlock], wide[kBlock], at_target[kBlock];
    for (int64_t r = 0; args.index && r < count; ++r)  // before it is overwritten
      at_target[r] = this->ignored(row + r) ? T(0) : this->logit(first + r * args.classes + args.index[row + r]);
    for (int64_t c = 0; c < args.classes; c += kBlock) {
      const int64_t n = part(c);
      const T* x = this->logits(first + c, block, count * n);
      T* const y = place(args.out, args.dtype, first + c, wide);
      for (int64_t r = 0; r < count; ++r) {
        const T largest = *this->stored(args.largest, row + r), factor = *this->stored(args.factor, row + r);
        const T grad = this->grad(row + r), product = factor * grad;
        const T* const from = x + r * n;
        T* const to = y + r * n;
        if (args.one_class() && args.cap == 0) {
          const auto gradient = [&](int64_t k) MEMKIT_INLINE { to[k] = exp_falling(from[k] - largest) * product; };
          for_elements<true>(n, gradient, from, to);
        } else {
          shares(c, first + r * n + c, b, n);
          const bool capped = args.cap != 0;
          MEMKIT_LOOP
          for (int64_t k = 0; k < n; ++k) {
            const T g = (exp_falling(from[k] - largest) * factor - b[k]) * grad;
            to[k] = g * select(capped, op.cap_slope(from[k]), T(1));
          }
        }
      }
      written<Lanes>(y, args.out, args.dtype, first + c, count * n);
    }
    for (int64_t r = 0; args.index && r < count; ++r)
      this->finish_gradient(row + r, first + r * args.classes, 1, at_target[r]);
  }

  // An ignored row.
  MEMKIT_FN void skip(LossPass pass, int64_t row) const {
    if (pass != LossPass::backward)
      *this->stored(args.loss, row) = *this->stored(args.factor, row) = *this->stored(args.largest, row) = 0;
    if (pass != LossPass::forward) this->clear(row * args.classes, args.classes);
  }

  // The classes from c on that a block takes.
  MEMKIT_FN int64_t part(int64_t c) const { return std::min(kBlock, args.classes - c); }

  MEMKIT_FN static void run(LossPass pass, const LossArgs& args, int64_t begin, int64_t end) {
    const Rows rows{{args}};
    const int64_t together = std::max<int64_t>(1, kBlock / args.classes);
    for (int64_t row = begin, n = 0; row < end; row += n) {
      n = std::min(together, end - row);
      if (n == 1 && rows.ignored(row)) {
        rows.skip(pass, row);
        continue;
      }
      if (pass != LossPass::backward) rows.forward(row, n, row + n == end);
      if (pass != LossPass::forward) rows.backward(row, n);
    }
  }
};

// Classes lie `inner` apart, and neighbours belong to neighbouring rows: n rows of one outer index at a time.
template <class Lanes, class T>
struct Columns : Reader<Lanes, T> {
  using Reader<Lanes, T>::args, Reader<Lanes, T>::op;

  MEMKIT_FN int64_t element(int64_t row, int64_t c) const {
    return (row / args.inner * args.classes + c) * args.inner + row % args.inner;
  }

  // b of class c in n rows, the first of which lies at i, `hot` apart.
  MEMKIT_FN void shares(int64_t i, int64_t c, T* b, int64_t n) const {
    if (args.probabilities) {
      this->probabilities(i, b, n);
    } else {
      std::fill_n(b, n, T(0));
    }
    const T w = this->weight(c);
    MEMKIT_LOOP
    for (int64_t k = 0; k < n; ++k) b[k] = op.share(b[k], w);
  }

  MEMKIT_FN void forward(int64_t row, int64_t n) const {
    T block[kBeside], b[kBeside], largest[kBeside], sum[kBeside], mass[kBeside], dot[kBeside];
    std::fill_n(largest, n, -std::numeric_limits<T>::infinity());
    for (T* each : {sum, mass, dot}) std::fill_n(each, n, T(0));
    const int64_t first = element(row, 0);
    for (int64_t c = 0; c < args.classes; ++c) {
      const T* x = this->logits(first + c * args.inner, block, n);
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) largest[k] = select(x[k] > largest[k], x[k], largest[k]);
    }
    for (int64_t k = 0; k < n; ++k) largest[k] = op.pivot(largest[k]);
    for (int64_t c = 0; c < args.classes; ++c) {
      const int64_t i = first + c * args.inner;
      const T* x = this->logits(i, block, n);
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) sum[k] += exp_falling(x[k] - largest[k]);
      if (args.one_class()) continue;
      shares(i, c, b, n);
      MEMKIT_LOOP
      for (int64_t k = 0; k < n; ++k) {
        dot[k] += b[k] * (x[k] - largest[k]);
        mass[k] += b[k];
      }
    }
    for (int64_t k = 0; k < n; ++k) this->finish(row + k, first + k, args.inner, largest[k], sum[k], mass[k], dot[k]);
  }

  MEMKIT_FN void backward(int64_t row, int64_t n) const {
    T block[kBeside], b[kBeside], wide[kBeside], grad[kBeside], product[kBeside], at_target[kBeside];
    const T* largest = this->stored(args.largest, row);
    const T* factor = this->stored(args.factor, row);
    for (int64_t k = 0; k < n; ++k) {
      const bool ignored = this->ignored(row + k);
      grad[k] = ignored ? T(0) : this->grad(row + k);
      product[k] = factor[k] * grad[k];
      if (args.index && !ignored) at_target[k] = this->logit(element(row + k, args.index[row + k]));
    }
    const bool capped = args.cap != 0;
    const int64_t first = element(row, 0);
    for (int64_t c = 0; c < args.classes; ++c) {
      const int64_t i = first + c * args.inner;
      const T* x = this->logits(i, block, n);
      T* const y = place(args.out, args.dtype, i, wide);
      if (args.one_class() && !capped) {
        MEMKIT_LOOP
        for (int64_t k = 0; k < n; ++k) y[k] = exp_falling(x[k] - largest[k]) * product[k];
      } else {
        shares(i, c, b, n);
        MEMKIT_LOOP
        for (int64_t k = 0; k < n; ++k) {
          const T g = (exp_falling(x[k] - largest[k]) * factor[k] - b[k]) * grad[k];
          y[k] = g * select(capped, op.cap_slope(x[k]), T(1));
        }
      }
      written<Lanes>(y, args.out, args.dtype, i, n);
    }
    for (int64_t k = 0; args.index && k < n; ++k) this->finish_gradient(row + k, first + k, args.inner, at_target[k]);
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

template <template <class, class> class Walk, class T>
struct Body {
  template <class Lanes>
  using Of = Walk<Lanes, T>;
};

template <template <class, class> class Walk>
void walk(LossPass pass, const LossArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Dtype::float64)
    return Compiled<Body<Walk, double>::template Of, has_v4<double>>::run(pass, args, begin, end);
  Compiled<Body<Walk, float>::template Of>::run(pass, args, begin, end);
}

}  // namespace

void cross_entropy(LossPass pass, const LossArgs& args, int64_t begin, int64_t end) {
  args.inner == 1 ? walk<Rows>(pass, args, begin, end) : walk<Columns>(pass, args, begin, end);
}

}  // namespace memkit::cpu

#include "channel_samples.h"

#include "channel_steps.h"

namespace memkit {
namespace {

// A call's samples, each in `ways` ranges of rows where there are fewer samples than threads.
template <class T>
class Samples {
 public:
  explicit Samples(const ChannelCall& call)
      : call(call), args(call.args), channels(args.channels), width(channels / call.groups) {
    const int64_t threads = at::get_num_threads(), most = std::max<int64_t>(1, args.numel() / kChannelGrain);
    ways = std::min({(threads + call.samples - 1) / call.samples, most, args.outer});
    s.statistics = call.samples * call.groups;
    s.channels = channels, s.groups = call.groups;
    s.size = width * args.outer;
    s.eps = call.eps;
    s.weight = static_cast<const T*>(call.weight.data);
    s.bias = static_cast<const T*>(call.bias.data);
    s.mean = static_cast<double*>(call.mean.data);
    s.variance = static_cast<double*>(call.variance.data);
  }

  int64_t parts() const { return call.samples * ways * channels; }
  // How many rows the range has.
  int64_t rows(int64_t way) const { return first_row(way + 1) - first_row(way); }

  // f(the arguments of a sample, begin, end, part): over the rows of each range, whose results go to `part`.
  template <class F>
  void each_range(const T* terms, const F& f) const {
    const int64_t grain = std::max<int64_t>(1, kChannelGrain * ways / std::max<int64_t>(1, args.numel()));
    at::parallel_for(0, call.samples * ways, grain, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit)
        f(sample(unit / ways, terms), first_row(unit % ways), first_row(unit % ways + 1), unit * channels);
    });
  }

  // f(i, channel, n, part): of each statistic in turn, where the part that n rows of a channel are has its results.
  template <class F>
  void each_part(int64_t i, const F& f) const {
    const int64_t sample = i / call.groups, first = i % call.groups * width;
    for (int64_t way = 0; way < ways; ++way)
      for (int64_t c = first; c < first + width; ++c) f(c, double(rows(way)), (sample * ways + way) * channels + c);
  }

  // The terms of each sample's channels.
  Room terms(const double* c1, const double* c2) {
    Room made(call.device, call.samples * terms_bytes<T>(call));
    T* const data = made.template as<T>();
    const Room roots = make_roots(call, s);
    for (int64_t i = 0; i < s.statistics; ++i) {
      const int64_t sample = i / call.groups, first = i % call.groups * width;
      const TermArrays<T> arrays{data + sample * 5 * channels, channels};
      for (int64_t c = first; c < first + width; ++c) arrays.put(c, s.terms_of(i, c, c1, c2));
    }
    s.roots = nullptr;
    return made;
  }

  const ChannelCall& call;
  const ChannelArgs& args;
  const int64_t channels, width;  // of a group
  int64_t ways;
  ChannelStatistics<T> s;

 private:
  int64_t first_row(int64_t way) const { return args.outer * way / ways; }

  ChannelArgs sample(int64_t n, const T* terms) const {
    ChannelArgs own = args;
    const auto at = [&](auto* array, Dtype dtype) {
      using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(array)>>, const char, char>;
      return array ? static_cast<Byte*>(array) + n * args.numel() * size_of(dtype) : nullptr;
    };
    own.x = at(own.x, own.dtype), own.grad_input = at(own.grad_input, own.dtype);
    own.y = at(own.y, own.out_dtype), own.grad = at(own.grad, own.out_dtype);
    own.terms = terms ? terms + n * 5 * channels : nullptr;
    return own;
  }
};

}  // namespace

void moments_by_samples(const ChannelCall& call) {
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    const Samples<T> samples(call);
    const auto& s = samples.s;
    const Room room = doubles(call, 2 * samples.parts());
    double *const means = room.as<double>(), *const m2 = means + samples.parts();
    samples.each_range(nullptr, [&](const ChannelArgs& args, int64_t begin, int64_t end, int64_t part) {
      cpu::channel_moments(args, begin, end, means + part, m2 + part);
    });
    for (int64_t i = 0; i < s.statistics; ++i) {
      double sum = 0, squares = 0;
      samples.each_part(i, [&](int64_t, double n, int64_t k) { sum += n * means[k]; });
      const double mean = sum / double(s.size);
      samples.each_part(i, [&](int64_t, double n, int64_t k) {
        const double d = means[k] - mean;
        squares += m2[k] + n * d * d;
      });
      s.mean[i] = mean, s.variance[i] = squares / double(s.size);
    }
  });
}

void forward_by_samples(const ChannelCall& call) {
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    Samples<T> samples(call);
    const Room terms = samples.terms(nullptr, nullptr);
    samples.each_range(terms.as<T>(), [](const ChannelArgs& args, int64_t begin, int64_t end, int64_t) {
      cpu::channel_forward(args, begin * args.channels, end * args.channels);
    });
  });
}

void sums_by_samples(const ChannelCall& call, double* dz, double* dz_x_hat, double* c1, double* c2) {
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    Samples<T> samples(call);
    const auto& s = samples.s;
    const Room room = doubles(call, 2 * samples.parts());
    double *const sums = room.as<double>(), *const distances = sums + samples.parts();
    const Room terms = samples.terms(nullptr, nullptr);
    samples.each_range(terms.as<T>(), [&](const ChannelArgs& args, int64_t begin, int64_t end, int64_t part) {
      cpu::channel_sums(args, begin, end, sums + part, distances + part);
    });
    std::fill_n(dz, samples.channels, 0.0);
    std::fill_n(dz_x_hat, samples.channels, 0.0);
    for (int64_t i = 0; i < s.statistics; ++i) {
      const double lost = s.lost(i), root = s.rstd(i);
      typename ChannelStatistics<T>::Sums all;
      samples.each_part(i, [&](int64_t c, double, int64_t k) {
        const double w = s.weight_of(c);
        all.dz += w * sums[k], all.distance += w * distances[k];
        dz[c] += sums[k], dz_x_hat[c] += (distances[k] - lost * sums[k]) * root;
      });
      s.finish_sums(i, all, c1, c2);
    }
  });
}

void backward_by_samples(const ChannelCall& call, const double* c1, const double* c2) {
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    Samples<T> samples(call);
    const Room terms = samples.terms(c1, c2);
    samples.each_range(terms.as<T>(), [](const ChannelArgs& args, int64_t begin, int64_t end, int64_t) {
      cpu::channel_backward(args, begin * args.channels, end * args.channels);
    });
  });
}

}  // namespace memkit

#include "channel_samples.h"

#include "channel_steps.h"

namespace memkit {
namespace {

// A call's samples, each in `ways` ranges of rows where there are fewer samples than threads.
template <class T>
class Samples {
 public:
  explicit Samples(const ChannelCall& call) : call(call), args(call.args), channels(args.channels) {
    const int64_t threads = at::get_num_threads(), most = std::max<int64_t>(1, args.numel() / kChannelGrain);
    ways = std::min({(threads + call.samples - 1) / call.samples, most, args.outer});
    s.statistics = call.samples * call.groups;
    s.channels = channels, s.groups = call.groups;
    s.step = s.count = channels / call.groups;
    s.size = s.count * args.outer;
    s.eps = call.eps;
    s.weight = static_cast<const T*>(call.weight.data);
    s.bias = static_cast<const T*>(call.bias.data);
    s.mean = static_cast<double*>(call.mean.data);
    s.variance = static_cast<double*>(call.variance.data);
  }

  int64_t parts() const { return call.samples * ways * channels; }
  int64_t first_row(int64_t way) const { return args.outer * way / ways; }

  // f(the arguments of a sample, begin, end, part): over the rows of each range, whose results go to `part`.
  template <class F>
  void each_range(const T* terms, const F& f) const {
    const int64_t grain = std::max<int64_t>(1, kChannelGrain * ways / std::max<int64_t>(1, args.numel()));
    at::parallel_for(0, call.samples * ways, grain, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit)
        f(sample(unit / ways, terms), first_row(unit % ways), first_row(unit % ways + 1), unit * channels);
    });
  }

  // f(begin, end): of the statistics of some samples.
  template <class F>
  void each_statistics(const F& f) const {
    at::parallel_for(0, call.samples, std::max<int64_t>(1, kChannelGrain / channels),
                     [&](int64_t begin, int64_t end) { f(begin * call.groups, end * call.groups); });
  }

  // Of the two numbers that each range has for a channel those of the first go to the k-th place of `one` and `other`, of one
  // for each of the sample's channels; add(k, way, part) joins the next ones to them.
  template <class Add>
  void join_ranges(double* one, double* other, const Add& add) const {
    for (int64_t sample = 0; ways > 1 && sample < call.samples; ++sample)
      for (int64_t way = 0; way < ways; ++way)
        for (int64_t c = 0; c < channels; ++c) {
          const int64_t k = sample * channels + c, part = (sample * ways + way) * channels + c;
          if (way == 0) {
            one[k] = one[part], other[k] = other[part];
          } else {
            add(k, way, part);
          }
        }
  }

  // The terms of each sample's channels.
  Room terms(const double* c1, const double* c2) const {
    Room made(call.device, call.samples * terms_bytes<T>(call));
    T* const data = made.template as<T>();
    each_statistics([&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += call.groups)
        cpu::group_terms<T>(s, i, i + call.groups, c1, c2, {data + i / call.groups * 5 * channels, channels});
    });
    return made;
  }

  const ChannelCall& call;
  const ChannelArgs& args;
  const int64_t channels;
  int64_t ways;
  ChannelStatistics<T> s;

 private:
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
    const Samples<decltype(computed)> samples(call);
    const Room room = doubles(call, 2 * samples.parts());
    double *const means = room.as<double>(), *const m2 = means + samples.parts();
    samples.each_range(nullptr, [&](const ChannelArgs& args, int64_t begin, int64_t end, int64_t part) {
      cpu::channel_moments(args, begin, end, means + part, m2 + part);
    });
    samples.join_ranges(means, m2, [&](int64_t k, int64_t way, int64_t part) {
      Moments<double> all{double(samples.first_row(way)), means[k], m2[k]};
      all.add({double(samples.first_row(way + 1) - samples.first_row(way)), means[part], m2[part]});
      means[k] = all.mean, m2[k] = all.m2;
    });
    samples.each_statistics([&](int64_t begin, int64_t end) { cpu::group_moments(samples.s, begin, end, means, m2); });
  });
}

void forward_by_samples(const ChannelCall& call) {
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    Samples<T> samples(call);
    const Room roots = make_roots(call, samples.s), terms = samples.terms(nullptr, nullptr);
    samples.each_range(terms.as<T>(), [](const ChannelArgs& args, int64_t begin, int64_t end, int64_t) {
      cpu::channel_forward(args, begin * args.channels, end * args.channels);
    });
  });
}

void sums_by_samples(const ChannelCall& call, double* dz, double* dz_x_hat, double* c1, double* c2) {
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    Samples<T> samples(call);
    const Room room = doubles(call, 2 * samples.parts()), roots = make_roots(call, samples.s);
    double *const sums = room.as<double>(), *const distances = sums + samples.parts();
    const Room terms = samples.terms(nullptr, nullptr);
    samples.each_range(terms.as<T>(), [&](const ChannelArgs& args, int64_t begin, int64_t end, int64_t part) {
      cpu::channel_sums(args, begin, end, sums + part, distances + part);
    });
    samples.join_ranges(sums, distances, [&](int64_t k, int64_t, int64_t part) {
      sums[k] += sums[part], distances[k] += distances[part];
    });
    samples.each_statistics(
        [&](int64_t begin, int64_t end) { cpu::group_sums(samples.s, begin, end, sums, distances, c1, c2); });
    cpu::group_parameters(samples.s, sums, distances, dz, dz_x_hat);
  });
}

void backward_by_samples(const ChannelCall& call, const double* c1, const double* c2) {
  with_computed(call, [&](auto computed) {
    using T = decltype(computed);
    Samples<T> samples(call);
    const Room roots = make_roots(call, samples.s), terms = samples.terms(c1, c2);
    samples.each_range(terms.as<T>(), [](const ChannelArgs& args, int64_t begin, int64_t end, int64_t) {
      cpu::channel_backward(args, begin * args.channels, end * args.channels);
    });
  });
}

}  // namespace memkit

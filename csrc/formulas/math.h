// Scalar mathematics the formulas are written in, for float and double.
//
// Branch-free: selects between values that are computed already, no tables, so the CPU compiler vectorises the loop
// around it. NaN in gives NaN out; comparisons are written so that NaN falls through a clamp unchanged. Only this
// file differs between host and device. "fit.py" prints the coefficients; errors there are before rounding.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define MEMKIT_FN __host__ __device__ __forceinline__
#else
#define MEMKIT_FN inline __attribute__((always_inline))
#endif

// What is compiled runs on a GPU, or stands for one in a test.
#if defined(__CUDA_ARCH__) || defined(MEMKIT_SIMT_DEVICE)
#define MEMKIT_DEVICE 1
#endif

namespace memkit {

// Both arms are values already: a plain data select, which the vectoriser accepts where it refuses `c ? f() : g()`.
template <class T>
MEMKIT_FN T select(bool condition, T yes, T no) {
  return condition ? yes : no;
}

// Clamps that let NaN through.
template <class T>
MEMKIT_FN T at_most(T x, T high) {
  return select(x > high, high, x);
}
template <class T>
MEMKIT_FN T at_least(T x, T low) {
  return select(x < low, low, x);
}

namespace detail {

template <class T>
struct Format;  // of the floating-point type
template <>
struct Format<float> {
  using Bits = std::uint32_t;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float round = 12582912.0f;   // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  static constexpr float integer = 8388608.0f;  // 2^23: its low bits count in units
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // high: 9 bits, so n * high is exact
  static constexpr float lowest = -104.0f;                                    // exp is 0 from here on
  static constexpr float highest = 89.0f;                                     // and infinite from here on
  static constexpr float subnormal_lift = 24;
};
template <>
struct Format<double> {
  using Bits = std::uint64_t;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double round = 6755399441055744.0, integer = 4503599627370496.0;
  static constexpr double ln2_high = 0.693147180369123816490, ln2_low = 1.90821492927058770002e-10;  // high: 33 bits
  static constexpr double lowest = -745.2, highest = 710.0;
  static constexpr double subnormal_lift = 54;
};

template <class T>
MEMKIT_FN typename Format<T>::Bits bits_of(T x) {
  typename Format<T>::Bits bits;
  __builtin_memcpy(&bits, &x, sizeof x);
  return bits;
}
template <class T>
MEMKIT_FN T from_bits(typename Format<T>::Bits bits) {
  T x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// Select by mask, where a select would make GCC split the code that follows and evaluate it once for each side.
template <class T>
MEMKIT_FN typename Format<T>::Bits mask_of(bool condition) {  // all ones where true
  using Bits = typename Format<T>::Bits;
  return Bits(0) - Bits(condition);
}
template <class T>
MEMKIT_FN T choose(typename Format<T>::Bits mask, T yes, T no) {
#if defined(MEMKIT_DEVICE)
  return select(mask != 0, yes, no);
#else
  return from_bits<T>(bits_of(no) ^ (mask & (bits_of(yes) ^ bits_of(no))));
#endif
}

// A number >= 0 as it is where `positive`, else its negative.
template <class T>
MEMKIT_FN T signed_by(bool positive, T size) {
#if defined(MEMKIT_DEVICE)
  return select(positive, size, -size);
#else
  using Bits = typename Format<T>::Bits;
  return from_bits<T>(bits_of(size) | (~mask_of<T>(positive) & ~(~Bits(0) >> 1)));
#endif
}

// c0 + x c1 + x^2 c2 + ...
template <class T>
MEMKIT_FN T polynomial(T, T c0) {
  return c0;
}
template <class T, class... Rest>
MEMKIT_FN T polynomial(T x, T c0, Rest... rest) {
  return c0 + x * polynomial(x, T(rest)...);
}

// expm1 of a reduced argument, |r| < ln2 / 2. Relative error of the fit 1.3e-8 (float), 1.8e-17 (double).
MEMKIT_FN float expm1_reduced(float r) {
  return r + r * r * polynomial(r, 0.5000000062f, 0.1666654316f, 0.04166628198f, 0.008366566042f, 0.00139464475f);
}
MEMKIT_FN double expm1_reduced(double r) {
  return r + r * r *
                 polynomial(r, 0.50000000000000054882, 0.16666666666666686028, 0.041666666666574170159,
                            0.0083333333333146068646, 0.0013888888932231719709, 0.00019841269902960063978,
                            0.000024801504600700364002, 2.7557228032567908945e-6, 2.762627077616993748e-7,
                            2.5114446235764971428e-8);
}

// x = n ln2 + r. `shifted` is n + Format::round, whose low bits are n: 2^(n + k) is one addition and one shift away.
template <class T>
struct Reduced {
  T shifted, r;
};
template <class T>
MEMKIT_FN Reduced<T> reduce(T x) {
  using F = Format<T>;
  T shifted = x * T(1.44269504088896340736) + F::round;
  T n = shifted - F::round;
  return {shifted, (x - n * F::ln2_high) - n * F::ln2_low};
}
template <class T>
MEMKIT_FN T power_of_two(T shifted, int k) {
  using F = Format<T>;
  return from_bits<T>((bits_of(shifted) + typename F::Bits(F::bias + k)) << F::mantissa);
}

// a / b for a normal b, on the device in float 0 where that is above 2^126: two instructions (2 ulp).
template <class T>
MEMKIT_FN T divide(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same<T, float>::value) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    return a * inverse;
  }
#endif
  return a / b;
}
// 2^x, 0 below the normal numbers: one instruction on the device (2 ulp).
MEMKIT_FN float near_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}
// log2(x) of a normal x: one instruction on the device (absolute error 2^-22 near 1).
MEMKIT_FN float near_log2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}
// sqrt(x), of a subnormal number 0 on the device in float: two instructions (1 ulp).
template <class T>
MEMKIT_FN T near_sqrt_of_normal(T x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same<T, float>::value) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
  }
#endif
  return std::sqrt(x);
}

}  // namespace detail

template <class T>
MEMKIT_FN T sqrt(T x) {
  return std::sqrt(x);
}
// 1 ulp.
template <class T>
MEMKIT_FN T near_sqrt(T x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same<T, float>::value) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
  }
#endif
  return std::sqrt(x);
}
template <class T>
MEMKIT_FN T absolute(T x) {
  using Bits = typename detail::Format<T>::Bits;
  return detail::from_bits<T>(detail::bits_of(x) & (~Bits(0) >> 1));
}
template <class T>
MEMKIT_FN T copy_sign(T magnitude, T sign) {  // of a magnitude >= 0
  using Bits = typename detail::Format<T>::Bits;
  return detail::from_bits<T>(detail::bits_of(magnitude) | (detail::bits_of(sign) & ~(~Bits(0) >> 1)));
}

// e^x for x below 70: 1 ulp, exact rounding through the subnormals to 0.
template <class T>
MEMKIT_FN T exp_falling(T x) {
#if defined(MEMKIT_DEVICE)
  return ::exp(x);
#else
  // A multiplication by 2^-lift rounds into the subnormals.
  constexpr int lift = int(detail::Format<T>::subnormal_lift);
  constexpr T drop = T(1) / T(std::uint64_t(1) << lift);
  detail::Reduced<T> v = detail::reduce(at_least(x, detail::Format<T>::lowest));
  T scale = detail::power_of_two(v.shifted, lift);
  return (scale + scale * detail::expm1_reduced(v.r)) * drop;
#endif
}

// The same. Coarse, for results of 2 bytes: two instructions on the device, (1 + |x|) epsilon, 0 below the normal numbers.
template <bool coarse, class T>
MEMKIT_FN T exp_falling(T x) {
#if defined(MEMKIT_DEVICE)
  if constexpr (coarse && std::is_same<T, float>::value) return detail::near_exp2(x * 1.44269504088896340736f);
#endif
  return exp_falling(x);
}

// e^x / 2 for every x: 1 ulp, infinite only where e^x is after doubling, and 0 below the normal numbers.
template <class T>
MEMKIT_FN T half_exp(T x) {
#if defined(MEMKIT_DEVICE)
  return T(0.5) * ::exp(x);
#else
  constexpr T low = std::is_same<T, float>::value ? T(-87) : T(-708);
  detail::Reduced<T> v = detail::reduce(at_least(at_most(x, detail::Format<T>::highest), low));
  T scale = detail::power_of_two(v.shifted, -1);
  return scale + scale * detail::expm1_reduced(v.r);
#endif
}

// e^x: 1 ulp over the whole range.
template <class T>
MEMKIT_FN T exp(T x) {
#if defined(MEMKIT_DEVICE)
  return ::exp(x);
#else
  constexpr int lift = int(detail::Format<T>::subnormal_lift);
  constexpr T drop = T(1) / T(std::uint64_t(1) << lift);
  detail::Reduced<T> v = detail::reduce(at_least(at_most(x, detail::Format<T>::highest), detail::Format<T>::lowest));
  bool rising = x > T(0);  // the scale alone must be a normal number: one power short, or lifted
  T scale = select(rising, detail::power_of_two(v.shifted, -1), detail::power_of_two(v.shifted, lift));
  return (scale + scale * detail::expm1_reduced(v.r)) * select(rising, T(2), drop);
#endif
}

// e^x - 1: 2 ulp, also near 0.
template <class T>
MEMKIT_FN T expm1(T x) {
#if defined(MEMKIT_DEVICE)
  return ::expm1(x);
#else
  detail::Reduced<T> v = detail::reduce(at_least(at_most(x, detail::Format<T>::highest), T(-40)));
  T half = detail::power_of_two(v.shifted, -1);
  T y = (half * detail::expm1_reduced(v.r) + (half - T(0.5))) * T(2);
  return select(x == T(0), x, y);  // keeps -0
#endif
}

namespace detail {

// (log(1 + e) / s - 2) / s^2 in z = s^2, s = e / (2 + e), e in [0, 1]: 4.6e-9, 5.1e-17 relative in the logarithm.
MEMKIT_FN float log1p_series(float z) {
  return polynomial(z, 0.6666641599f, 0.4002156679f, 0.2800095589f, 0.2801672921f);
}
MEMKIT_FN double log1p_series(double z) {
  return polynomial(z, 0.66666666666677252958, 0.39999999996139118865, 0.28571429051246163711, 0.22222193163982041048,
                    0.18182808375433005733, 0.15364370178011854817, 0.13585736978614133319, 0.09905252511967620618,
                    0.17735456400603977043);
}

// (tanh(x) - x) / x^3 in z = x^2, |x| < 0.7: 1.44e-8, 5.39e-18 relative in tanh.
MEMKIT_FN float tanh_series(float z) {
  return polynomial(z, -0.3333319915f, 0.1332928521f, -0.05356930468f, 0.02011685512f, -0.005159217951f);
}
MEMKIT_FN double tanh_series(double z) {
  return polynomial(z, -0.33333333333333126938, 0.13333333333302965926, -0.053968253952960547561,
                    0.02186948815261249942, -0.0088632299054356328473, 0.003592075480442297288,
                    -0.0014555057121838845748, 0.0005886147170872741881, -0.00023491388306107839829,
                    0.000088226069598070950278, -0.00002714547345185529758, 4.8266075896352213733e-6);
}

}  // namespace detail

// log(1 + e) for e in [0, 1]: 1 ulp.
template <class T>
MEMKIT_FN T log1p_unit(T e) {
  T s = detail::divide(e, T(2) + e), z = s * s;
  return e - s * (e - z * detail::log1p_series(z));
}

// log(x) for normal x > 0, given x - 1 as exactly as the caller has it: relative error 1e-4, or 7e-8 where `fine`. On the
// device for x of 1 at most, but for rounding, 7e-7.
template <bool fine, class T>
MEMKIT_FN T log_near_one(T x, T x_minus_1) {
#if defined(MEMKIT_DEVICE)
  // The logarithm instruction is absolute near 1; there, below 1, a series takes over.
  float f = float(x_minus_1);
  float series = detail::polynomial(f, 0.9999999629f, -0.5000104995f, 0.3328566379f, -0.2577997877f, 0.1439132404f,
                                    -0.3398007672f);
  return T(select(f > -0.25f, f * series, 0.693147181f * detail::near_log2(float(x))));
#else
  using F = detail::Format<T>;
  using Bits = typename F::Bits;
  Bits root_half = detail::bits_of(T(0.70710678118654752440));
  Bits k = (detail::bits_of(x) - root_half + (Bits(F::bias) << F::mantissa)) >> F::mantissa;  // exponent + bias
  T m = detail::from_bits<T>(detail::bits_of(x) - ((k - Bits(F::bias)) << F::mantissa));      // in [0.707, 1.414)
  T n = detail::from_bits<T>(detail::bits_of(F::integer) | k) - (F::integer + T(F::bias));
  T f = detail::choose(detail::mask_of<T>(n == T(0)), x_minus_1, m - T(1));
  T slope;  // log(1 + f) / f, least squares at Chebyshev points
  if constexpr (fine) {
    slope = detail::polynomial(f, T(0.999999982), T(-0.499999944), T(0.333339989), T(-0.25001352), T(0.19962965),
                               T(-0.165833135), T(0.149092098), T(-0.141956806), T(0.0863032539));
  } else {
    slope =
        detail::polynomial(f, T(0.9999662162), T(-0.4994503217), T(0.3363884542), T(-0.2709496232), T(0.1765850655));
  }
  return n * T(0.69314718055994530942) + f * slope;
#endif
}

// a / (1 + e^-x): 2 ulp while normal, 0 below; coarse: (1 + |x|) epsilon.
template <bool coarse, class T>
MEMKIT_FN T times_sigmoid(T a, T x) {
#if defined(MEMKIT_DEVICE)
  if constexpr (coarse && std::is_same<T, float>::value)
    return detail::divide(a, detail::near_exp2(x * -1.44269504088896340736f) + 1.0f);
#endif
  return detail::divide(a, T(2) * half_exp(-x) + T(1));
}

// tanh(x): 1 ulp. 1 - 2 e / (1 + e), e = e^(-2|x|), with what rounding took from e and from 1 + e given back. Coarse: on the
// device 7e-6, from 1 - 2 / (1 + e^(2|x|)).
template <bool coarse, class T>
MEMKIT_FN T tanh(T x) {
#if defined(MEMKIT_DEVICE)
  if constexpr (!coarse || !std::is_same<T, float>::value) {
    return ::tanh(x);
  } else {
    const float t = absolute(x);
    const float e = detail::near_exp2(t * 2.88539008177792681472f), large = 1.0f - detail::divide(2.0f, e + 1.0f);
    return copy_sign(select(t < 0.05f, t - t * t * t * (1.0f / 3), large), x);
  }
#else
  T t = absolute(x), z = t * t;
  T small = t + t * z * detail::tanh_series(z);
  detail::Reduced<T> v = detail::reduce(at_least(T(-2) * t, T(-79)));
  T scale = detail::power_of_two(v.shifted, 0), p = scale * detail::expm1_reduced(v.r);
  T e = scale + p, lost = p - (e - scale), q = detail::divide(e + e, T(1) + e);
  T large = T(1) - (q + ((e + e - q) - q * e + T(1.4) * lost));
  return copy_sign(select(t < T(0.7), small, large), x);
#endif
}

namespace detail {

// The coefficients of 2^r for |r| <= 1/2 as arguments of f: relative error of the fit 1.9e-9, coarse 2.6e-6.
template <bool coarse, class F>
MEMKIT_FN auto with_exp2_coefficients(const F& f) {
  if constexpr (coarse)
    return f(0.9999992545f, 0.6931217393f, 0.2402475025f, 0.05591823126f, 0.009570042659f);
  else
    return f(1.000000001f, 0.6931472057f, 0.2402264689f, 0.05550328772f, 0.009618489002f, 0.001339993287f,
             0.0001534579963f);
}
template <bool coarse>
MEMKIT_FN float exp2_reduced(float r) {
  return with_exp2_coefficients<coarse>([&](auto... coefficients) { return polynomial(r, coefficients...); });
}

}  // namespace detail

template <class T>
constexpr T normal_end = std::is_same<T, float>::value ? T(13.1) : T(39);  // e^(-t^2 / 2) is subnormal from here on

// e^(-t^2 / 2) for t in [0, normal_end]: relative error (1 + t^2) epsilon, that of rounding t^2 once. In base 2 there
// the reduction is one multiplication and the scale one addition of integers.
template <bool coarse, class T>
MEMKIT_FN T bell(T t) {
#if !defined(MEMKIT_DEVICE)
  if constexpr (std::is_same<T, float>::value) {
    using F = detail::Format<float>;
    constexpr float half_log2_e = 0.72134752044448170368f;
    float square = t * t, shifted = F::round - square * half_log2_e, n = shifted - F::round;
    float power = detail::exp2_reduced<coarse>(-n - square * half_log2_e);
    return detail::from_bits<float>(detail::bits_of(power) + (detail::bits_of(shifted) << F::mantissa));
  }
#else
  if constexpr (coarse && std::is_same<T, float>::value) return detail::near_exp2(t * t * -0.72134752044448170368f);
#endif
  return exp_falling(T(-0.5) * t * t);
}

// Phi(-t) e^(t^2 / 2) for t in [0, normal_end]: relative error of the fit 1.3e-8 up to 4.5, where this times the bell is
// 3e-6, and 6e-5 at the end (float); 4.7e-6 (coarse); 5.9e-17 (double).
template <bool coarse>
MEMKIT_FN float normal_tail_ratio(float t) {
  if constexpr (coarse)
    return detail::divide(detail::polynomial(t, 0.5000023362f, 0.2487388103f, 0.05107400481f),
                          detail::polynomial(t, 1.0f, 1.295541464f, 0.6347340799f, 0.1273822666f));
  else
    return detail::divide(
        detail::polynomial(t, 0.4999999938f, 0.3079739902f, 0.09183833492f, 0.01104039342f, 1.335774867e-6f),
        detail::polynomial(t, 1.0f, 1.413831704f, 0.8117602828f, 0.2287782191f, 0.02777674117f));
}
template <bool coarse>
MEMKIT_FN double normal_tail_ratio(double t) {
  double p = detail::polynomial(t, 0.5, 0.85005123341322563249, 0.71495472527223126922, 0.38520902956797241108,
                                0.14600710691109621001, 0.040525525332566843096, 0.0083364934696056011384,
                                0.001257649861322322783, 0.00013383559712542391182, 9.1542075085350062302e-6,
                                3.1064850186764598769e-7);
  double q = detail::polynomial(t, 1.0, 2.4979870276293176943, 2.9230147329756642494, 2.1196143920307341289,
                                1.0610828730587060177, 0.38621886458525459826, 0.1046889960542078925,
                                0.021230408970682639715, 0.0031754068974055698903, 0.00033625477222417267972,
                                0.000022946195372740026897, 7.7868031825317599686e-7);
  return p / q;
}

}  // namespace memkit

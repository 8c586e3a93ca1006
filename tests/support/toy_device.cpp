// The device `toy`, of torch's PrivateUse1 kind, for tests. Its memory is host memory, and its
// operators run on the CPU. It behaves as other devices do: only operators can use its memory,
// which is not zero at first; they refuse tensors of several devices; backward runs in a thread of
// the device; random numbers have a generator of their own. Everything is synchronous. `toy::has`
// sets whether the device has more than one stream, and events.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

using namespace at;

static const Device TOY(kPrivateUse1, 0);
static bool has_streams = true, has_events = true;

struct Memory final : Allocator {
  DataPtr allocate(size_t nbytes) override {
    void* start = nbytes ? c10::alloc_cpu(nbytes) : nullptr;
    if (start) std::memset(start, 0xFF, nbytes);  // NaN in every floating-point dtype
    return {start, start, &c10::free_cpu, TOY};
  }
  DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
static Memory memory;
REGISTER_ALLOCATOR(kPrivateUse1, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Base = c10::impl::DeviceGuardImplInterface;
  static thread_local StreamId current;
  c10::DeviceType type() const override { return kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  Device exchangeDevice(Device) const override { return TOY; }
  Device getDevice() const override { return TOY; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, TOY, current); }
  Stream exchangeStream(Stream next) const override {
    return Stream(Stream::UNSAFE, TOY, std::exchange(current, next.id()));
  }
  Stream getNewStream(Device device, int priority) const override {
    static std::atomic<StreamId> last = 0;
    if (!has_streams) return Base::getNewStream(device, priority);
    return Stream(Stream::UNSAFE, TOY, ++last);
  }
  Stream getStreamFromGlobalPool(Device, bool) const override { return getNewStream(TOY, 0); }
  void record(void** e, const Stream& s, c10::DeviceIndex i, c10::EventFlag f) const override {
    if (!has_events) Base::record(e, s, i, f);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
thread_local StreamId Guard::current = 0;
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
};

static Tensor on_cpu(const Tensor& t) {
  if (t.is_cpu()) return t;
  return from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(kCPU));
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

static Scalar scalar_of(const Tensor& t) { return on_cpu(t).item(); }

using Size = IntArrayRef;
template <typename T> using Maybe = std::optional<T>;
static const c10::DispatchKeySet KEYS(DispatchKey::PrivateUse1);

static Tensor allocate(Size size, Maybe<ScalarType> dtype, Maybe<Layout>, Maybe<Device>,
                       Maybe<bool>, Maybe<MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, dtype_or_default(dtype), format);
}

static Tensor allocate_strided(Size size, Size stride, Maybe<ScalarType> dtype, Maybe<Layout>,
                               Maybe<Device>, Maybe<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, dtype_or_default(dtype));
}

static Tensor& rng_state() {
  static Tensor state = at::detail::createCPUGenerator().get_state();
  return state;
}

static void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    std::vector<Tensor> tensors;
    if (value.isTensor()) tensors = {value.toTensor()};
    if (value.isTensorList()) tensors = value.toTensorVector();
    for (const auto& t : tensors)
      TORCH_CHECK(!t.defined() || t.dim() == 0 || t.device() == TOY, op.schema().name(),
                  ": found at least two devices, ", t.device(), " and ", TOY);
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  auto before = generator.get_state();
  generator.set_state(rng_state());
  native::cpu_fallback(op, stack);
  rng_state() = generator.get_state();
  generator.set_state(before);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &allocate);
  m.impl("empty_strided", &allocate_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &scalar_of);
  m.impl("as_strided", &native::as_strided_tensorimpl);
  m.impl("view", &native::view);
  m.impl("_reshape_alias", &native::_reshape_alias);
  m.impl("resize_", &native::resize_);
  m.impl("set_.source_Storage_storage_offset", &native::set_storage_cpu_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(&native::set_));
  // else torch composes it of other operators, which round differently
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY(toy, m) {
  RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("has(bool streams, bool events) -> ()", [](bool streams, bool events) {
    has_streams = streams, has_events = events;
  });
  m.def("get_rng_state() -> Tensor", [] { return rng_state().clone(); });
  m.def("set_rng_state(Tensor to) -> ()", [](const Tensor& to) {
    at::detail::createCPUGenerator().set_state(to);  // refuses the state of another device
    rng_state() = to.clone();
  });
}

// A "cuda" made of this machine's memory and of its kernels, for a build of torch without CUDA. Everything is as on a
// GPU (the type of device, several of them, an allocator with statistics, generators of their own, streams and events by
// name, autograd's thread for each device, tensors that must not be mixed with those of the host), except that a kernel
// has run when it is queued. Fresh memory is full of NaN.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto CUDA_TYPE = c10::DeviceType::CUDA;
constexpr int MOST = 8;

int count() {
  static int devices = std::min(MOST, std::atoi(std::getenv("HOST_CUDA_DEVICES") ?: "4"));
  return devices;
}

// --- devices, streams, events -----------------------------------------------------------------------------------------

thread_local int present = 0;
thread_local c10::StreamId streams[MOST] = {};
std::atomic<int64_t> next_stream{1};

c10::Device device_at(int index) {
  return {CUDA_TYPE, static_cast<c10::DeviceIndex>(index)};
}

c10::Stream stream_of(int index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(index), id);
}

struct On {  // a device, for as long as this lives
  int before = present;
  explicit On(int index) {
    present = index;
  }
  ~On() {
    present = before;
  }
};

struct Event {
  double at = 0;  // ms
};

double now() {
  auto passed = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(passed).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = CUDA_TYPE;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override {
    return CUDA_TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return device_at(present);
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_cuda() && device.index() < count(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    present = index(device);
  }
  static int index(c10::Device device) {
    return device.index() < 0 ? present : device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index(device), streams[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(index(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    bool fits = device == -1 || device == stream.device_index();
    TORCH_CHECK(fits, "Event device index does not match recording stream's device index");
    if (!*event)
      *event = new Event();
    static_cast<Event*>(*event)->at = now();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    return static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
  }
  // What is queued is done.
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(count());
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// --- memory -------------------------------------------------------------------------------------------------------------

constexpr size_t TOTAL = 8ull << 30;  // bytes of each device

struct Block {
  int device;
  size_t size;
};
std::mutex mutex;
std::map<char*, Block> blocks;
std::map<char*, size_t> pinned;
size_t held[MOST] = {}, peak[MOST] = {};
int64_t allocations[MOST] = {};

char* fresh(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(!posix_memalign(&memory, 512, size), "the host has no memory left");
  return static_cast<char*>(memory);
}

void release(void* memory) {
  if (!memory)
    return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(static_cast<char*>(memory));
    held[found->second.device] -= found->second.size;
    blocks.erase(found);
  }
  free(memory);
}

void unpin(void* memory) {
  if (!memory)
    return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<char*>(memory));
  }
  free(memory);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = device_at(present);
    if (!bytes)
      return {nullptr, nullptr, &release, device};
    size_t size = (bytes + 511) / 512 * 512;
    char* memory = fresh(size);
    memset(memory, 0xff, size);
    std::lock_guard<std::mutex> lock(mutex);
    blocks[memory] = {present, size};
    held[present] += size;
    peak[present] = std::max(peak[present], held[present]);
    allocations[present]++;
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = held[device];
      (*bytes)[0].peak = peak[device];
    }
    stats.allocation[0].allocated = stats.num_device_alloc = allocations[device];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    peak[device] = held[device];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {TOTAL - held[device], TOTAL};
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_memory)

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    char* memory = bytes ? fresh(bytes) : nullptr;
    if (memory) {
      std::lock_guard<std::mutex> lock(mutex);
      pinned[memory] = bytes;
    }
    return {memory, memory, &unpin, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};
PinnedMemory pinned_memory;

// --- generators -----------------------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {  // other numbers than the host's of the same seed
  at::Generator inner = at::detail::createCPUGenerator();
  uint64_t told = c10::default_rng_seed_val;
  explicit DeviceGenerator(int index)
      : c10::GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    told = seed;
    inner.set_current_seed(seed ^ 0x9e3779b97f4a7c15ull);
  }
  uint64_t current_seed() const override {
    return told;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return told;
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override {
    return 0;
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* twin = new DeviceGenerator(device_.index());
    twin->inner = inner.clone();
    twin->told = told;
    return twin;
  }
};

at::Generator& default_generator(int index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MOST; i++)
      made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all[index < 0 ? present : index];
}

}  // namespace

// --- what torch asks of CUDA ------------------------------------------------------------------------------------------------

namespace at {

struct HostCUDAHooks final : CUDAHooksInterface {
  explicit HostCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasCUDART() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(count());
  }
  int getNumGPUs() const override {
    return count();
  }
  void setCurrentDevice(DeviceIndex device) const override {
    Guard().setDevice(device_at(device));
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(present);
  }
  DeviceIndex current_device() const override {
    return static_cast<DeviceIndex>(present);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto* at = static_cast<char*>(const_cast<void*>(data));
    auto after = pinned.upper_bound(at);
    return after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second;
  }
  Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  Allocator* getCUDADeviceAllocator() const override {
    return &device_memory;
  }
  Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto* at = static_cast<char*>(data);
    auto after = blocks.upper_bound(at);
    bool found = after != blocks.begin() && at < std::prev(after)->first + std::prev(after)->second.size;
    TORCH_CHECK(found, "no memory of a device");
    return device_at(std::prev(after)->second.device);
  }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator<DeviceGenerator>(device < 0 ? present : device);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  std::string showConfig() const override {
    return "memory of the host";
  }
  long versionCUDART() const override {
    return 13000;
  }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", HostCUDAHooks)

}  // namespace at

namespace {

// --- tensors --------------------------------------------------------------------------------------------------------------

// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu())
    return tensor;
  auto* keeps = new c10::Storage(tensor.storage());
  auto let_go = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::DataPtr data(keeps->mutable_data(), keeps, let_go, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), keeps->nbytes(), std::move(data), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

int index_of(std::optional<c10::Device> device) {
  if (!device || !device->has_index())
    return present;
  TORCH_CHECK(device->index() < count(), "CUDA error: invalid device ordinal");
  return device->index();
}

const auto KEYS = c10::DispatchKeySet(c10::DispatchKey::CUDA);
using MaybeType = std::optional<c10::ScalarType>;
using MaybeLayout = std::optional<c10::Layout>;
using MaybeDevice = std::optional<c10::Device>;
using MaybeFormat = std::optional<c10::MemoryFormat>;

at::Tensor empty(
    c10::IntArrayRef size, MaybeType dtype, MaybeLayout, MaybeDevice device, std::optional<bool> pin, MaybeFormat format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  On on(index_of(device));
  return at::detail::empty_generic(size, &device_memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, MaybeType dtype, MaybeLayout, MaybeDevice device,
    std::optional<bool>) {
  On on(index_of(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes())
    to.resize_(self.sizes());
  return copy_from(self, to, false);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, MaybeFormat format) {
  On on(self.device().index());
  auto* tensor = self.unsafeGetTensorImpl();
  auto* storage = self.storage().unsafeGetStorageImpl();
  auto numel = c10::multiply_integers(size);
  size_t needed = (numel + tensor->storage_offset()) * self.itemsize();
  if (numel && storage->nbytes() < needed) {
    auto larger = device_memory.allocate(needed);
    if (storage->nbytes())
      memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(needed);
  }
  if (self.sizes() != size)
    tensor->set_sizes_contiguous(size);
  if (format)
    tensor->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage_and_shape(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_offset(offset);
  if (stride.data() == nullptr)
    tensor->set_sizes_contiguous(size);
  else
    tensor->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_and_shape(self, source, 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_and_shape(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  On on(self.device().index());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, true);
  return set_storage_and_shape(self, nothing, 0, {0}, {});
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return on_host(self).item();
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

void record_stream(at::Tensor&, c10::Stream) {}

// --- products of low precision with results of another dtype, which the host does not have ------------------------------------

at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType to) {
  return at::mm(a.to(to), b.to(to));
}

at::Tensor& mm_dtype_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType to, at::Tensor& out) {
  return out.copy_(mm_dtype(a, b, to));
}

at::Tensor addmm_dtype(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType to, const at::Scalar& beta,
    const at::Scalar& alpha) {
  return at::addmm(self.to(to), a.to(to), b.to(to), beta, alpha);
}

at::Tensor& addmm_dtype_out(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType to, const at::Scalar& beta,
    const at::Scalar& alpha, at::Tensor& out) {
  return out.copy_(addmm_dtype(self, a, b, to, beta, alpha));
}

int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

// --- all other operations -------------------------------------------------------------------------------------------------

using Stack = torch::jit::Stack;

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
  if (value.isTensor())
    see(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector())
      see(tensor);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor)
        see(*tensor);
}

c10::IValue with_each_tensor(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor())
    return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector())
      changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

// The host's kernel on the same memory; by way of copies where it may have to grow what it is given.
void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  for (const auto& argument : arguments)
    if (argument.is_out())
      return at::native::cpu_fallback(op, stack);
  size_t begin = stack->size() - arguments.size();
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  MaybeDevice target;
  std::map<c10::StorageImpl*, at::Tensor> from;
  auto to_host = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda())
      return tensor;
    target = tensor.device();
    auto made = on_host(tensor);
    from[made.storage().unsafeGetStorageImpl()] = tensor;
    return made;
  };
  for (size_t i = begin; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      target = device_at(index_of(value.toDevice()));
      value = c10::Device(c10::kCPU);
    } else {
      value = with_each_tensor(value, to_host);
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(*stack);
  }
  if (!target)
    return;
  auto to_device = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu())
      return tensor;
    auto found = from.find(tensor.storage().unsafeGetStorageImpl());
    if (found != from.end())  // a view
      return found->second.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, target, {});
    on_host(made).copy_(tensor);
    return made;
  };
  size_t first = stack->size() - schema.returns().size();
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto& value = (*stack)[first + r];
    const auto* alias = schema.returns()[r].alias_info();
    if (!alias || !alias->isWrite()) {
      value = with_each_tensor(value, to_device);
      continue;
    }
    for (size_t i = 0; i < arguments.size(); i++) {  // what was written into is what is returned
      if (arguments[i].alias_info() && *arguments[i].alias_info() == *alias) {
        value = given[i];
        break;
      }
    }
  }
}

// Those that draw without an argument for a generator draw from the host's: it stands in for the device's meanwhile.
void run_with_numbers(const c10::OperatorHandle& op, Stack* stack, DeviceGenerator& own) {
  auto host = at::detail::getDefaultCPUGenerator();
  auto kept = host.get_state();
  host.set_state(own.inner.get_state());
  run(op, stack);
  own.inner.set_state(host.get_state());
  host.set_state(kept);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  static const std::set<std::string> mixes = {
      "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"};
  static const std::set<std::string> draws = {"aten::native_dropout", "aten::_fused_dropout"};
  const auto& schema = op.schema();
  const auto& name = schema.name();
  size_t begin = stack->size() - schema.arguments().size();
  MaybeDevice device;
  bool host = false;
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined())
      return;
    if (tensor.is_cuda()) {
      TORCH_CHECK(
          !device || *device == tensor.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          tensor.device(), "! (", name, ")");
      device = tensor.device();
    } else {
      host |= tensor.is_cpu() && tensor.dim() > 0;  // a number may lie anywhere
    }
  };
  for (size_t i = begin; i < stack->size(); i++)
    each_tensor((*stack)[i], see);
  TORCH_CHECK(
      !(host && device) || mixes.count(name),
      "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (", name,
      ")");
  On on(device ? device->index() : present);
  auto& numbers = default_generator(present);
  bool told = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos)
      continue;
    told = true;
    auto& value = (*stack)[begin + i];
    auto generator = value.isNone() ? numbers : value.toGenerator();
    if (auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl()))
      value = own->inner;
  }
  if (!told && (draws.count(name) || name.rfind("aten::rand", 0) == 0))
    run_with_numbers(op, stack, *dynamic_cast<DeviceGenerator*>(numbers.unsafeGetGeneratorImpl()));
  else
    run(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_and_shape);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
  m.impl("mm.dtype", mm_dtype);
  m.impl("mm.dtype_out", mm_dtype_out);
  m.impl("addmm.dtype", addmm_dtype);
  m.impl("addmm.dtype_out", addmm_dtype_out);
  // Whole: a choice among kernels of GPUs comes first in them.
  for (auto* name : {"convolution", "convolution_backward", "_convolution", "convolution_overrideable"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &plain_attention)
}

// --- for bindings.cpp -------------------------------------------------------------------------------------------------------

at::Generator host_cuda_generator(int index) {
  return default_generator(index);
}

at::Tensor host_cuda_on_host(const at::Tensor& tensor) {
  return on_host(tensor);
}

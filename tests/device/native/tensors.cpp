// Operators that are not kernels of the CPU on other memory: allocation, views of storages, copies, record_stream.
#include "tensors.hpp"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace emulated {
namespace {

constexpr size_t STAGED_BYTES = 64 << 10;  // a copy from pageable memory of so many bytes does not block its caller
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

struct {
  uint64_t seed = 0, offset = 0;
} random_state;

// Makes a device current for allocations; see c10's guard.
struct OnDevice {
  explicit OnDevice(c10::DeviceIndex device) : before(current_device()) {
    if (device >= 0) current_device() = device;
  }
  ~OnDevice() { current_device() = before; }
  c10::DeviceIndex before;
};

OnDevice on(std::optional<c10::Device> device) { return OnDevice(device ? device->index() : -1); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto guard = on(device);
  return at::detail::empty_generic(size, device_allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  auto guard = on(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), KEYS, c10::dtype_or_default(dtype));
}

void resize_storage(c10::StorageImpl* storage, size_t num_bytes) {
  OnDevice guard(storage->device().index());
  c10::DataPtr data = device_allocator()->allocate(num_bytes);
  if (size_t kept = std::min(num_bytes, storage->nbytes())) {
    Lock lock(mutex());
    launch(lock, current_stream(current_device()), "resize",
           [to = data.get(), from = storage->data(), kept] { memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(num_bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t num_bytes = (self.numel() + self.storage_offset()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < num_bytes) resize_storage(storage, num_bytes);
  return self;
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

bool is_pinned(const at::Tensor& tensor) {
  Lock lock(mutex());
  Block* block = block_at(lock, tensor.const_data_ptr());
  return block && block->pinned;
}

// A copy between two places of which at least one is on the device. As with CUDA, it blocks the host unless host memory
// is pinned and the caller does not ask for it; small copies from pageable memory are staged.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || !self.numel()) return self;
  int stream = current_stream((self.is_cuda() ? self : source).device().index());
  std::string by = "aten::copy_ at " + calling_line();
  at::Tensor from = source.expand(self.sizes());
  bool on_host = !self.is_cuda() || !source.is_cuda();
  const at::Tensor& host = self.is_cuda() ? source : self;
  bool pageable = on_host && !is_pinned(host);
  bool staged = pageable && self.is_cuda() && non_blocking && source.nbytes() <= STAGED_BYTES;
  bool blocks = on_host && (!non_blocking || (pageable && !staged));
  // Only staged copies own memory: the allocators of pinned and of device memory know what copies use.
  at::Tensor input = pageable && self.is_cuda() ? source.clone().expand(self.sizes()) : host_view(from);
  MomentPtr now;
  {
    Lock lock(mutex());
    now = launch(lock, stream, "copy", [output = host_view(self), input]() mutable {
      at::NoGradGuard no_grad;
      output.copy_(input);
    });
    check_tensor(lock, source, stream, now, false, by);
    check_tensor(lock, self, stream, now, true, by);
    if (on_host && !pageable) block_at(lock, host.const_data_ptr())->transfers.push_back(now);
  }
  if (blocks) {
    count_wait(std::string("copy ") + (self.is_cuda() ? "from" : "to") + (pageable ? " pageable" : " pinned") + " memory",
               !non_blocking || !self.is_cuda());
    await(now, "copy", !self.is_cuda());
  }
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Lock lock(mutex());
  if (Block* block = block_at(lock, self.storage().data())) block->users.insert(number_of(stream));
}

// By default attention runs by plain operators, of which every one is checked.
bool fused_attention = false;

// CUDA's choice without dropout: 1 is flash attention, 2 is memory-efficient attention, which takes masks.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor&,
                         const std::optional<at::Tensor>& mask, double dropout, bool, std::optional<double>, bool) {
  if (!fused_attention || dropout > 0) return 0;
  auto& allowed = at::globalContext();
  if (query.element_size() == 2 && !mask) return allowed.userEnabledFlashSDP() ? 1 : 0;
  return query.size(-3) == key.size(-3) && allowed.userEnabledMemEfficientSDP() ? 2 : 0;
}

// Rows of equal length at equal distances, or all bytes from the first to the last.
Extent extent_of(const at::Tensor& tensor) {
  size_t item = tensor.element_size(), last = 0;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride and size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
    if (tensor.size(i) > 1 && tensor.stride(i)) dimensions.push_back({tensor.stride(i), tensor.size(i)});
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t row = 1, pitch = 0, reach = 0;
  for (auto [stride, size] : dimensions) {
    if (!pitch && stride == row)
      row *= size;
    else if (!pitch)
      pitch = stride, reach = stride * size;
    else if (stride == reach)
      reach *= size;
    else
      return {0, (last + 1) * item};
  }
  return {0, (last + 1) * item, pitch ? row * item : 0, pitch * item};
}

// A function that runs on a stream, such as a collective: called in stream order with no argument.
void queue_call(int64_t stream, at::TensorList reads, at::TensorList writes, std::string name, int64_t function) {
  std::string by = name + " at " + calling_line();
  Lock lock(mutex());
  MomentPtr now = launch_call(lock, stream, name, reinterpret_cast<void (*)()>(function));
  for (const at::Tensor& tensor : reads) check_tensor(lock, tensor, stream, now, false, by);
  for (const at::Tensor& tensor : writes) check_tensor(lock, tensor, stream, now, true, by);
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [](void*) {},
                       options);
}

void check_tensor(Lock& lock, const at::Tensor& tensor, int stream, const MomentPtr& now, bool writes,
                  const std::string& by) {
  if (tensor.defined() && tensor.is_cuda() && tensor.numel())
    check_access(lock, tensor.const_data_ptr(), extent_of(tensor), stream, now, writes, by);
}

uint64_t next_seed() {
  Lock lock(mutex());
  return random_state.seed * 0x9E3779B97F4A7C15 + random_state.offset++;
}

extern "C" {
void emulated_fuse_attention() { fused_attention = true; }
void emulated_seed(uint64_t seed, uint64_t offset) { random_state = {seed, offset}; }
uint64_t emulated_initial_seed() { return random_state.seed; }
uint64_t emulated_random_offset() { return random_state.offset; }
}

}  // namespace emulated

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace emulated;
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("copy_", &copy);
  m.impl("record_stream", &record_stream);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}

TORCH_LIBRARY(emulated, m) {
  using namespace emulated;
  m.def("host_view(Tensor tensor) -> Tensor", &host_view);
  m.def("queue_call(int stream, Tensor[] reads, Tensor[] writes, str name, int function) -> ()", &queue_call);
  m.def("resize_storage(Tensor tensor, int num_bytes) -> ()", [](const at::Tensor& tensor, int64_t num_bytes) {
    resize_storage(tensor.storage().unsafeGetStorageImpl(), num_bytes);
  });
}

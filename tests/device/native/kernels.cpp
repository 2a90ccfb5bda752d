// Kernels of the emulated device: the CPU's, queued on the current stream by one boxed fallback.
#include "tensors.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>

namespace emulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

// The value with `change` applied to its tensors.
template <class F>
IValue with_tensors(const IValue& value, F change) {
  auto changed = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return changed(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(changed(tensor));
    return list;
  }
  if (value.isList() && value.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : value.toListRef())
      list.push_back(item.isTensor() ? std::optional<at::Tensor>(changed(item.toTensor())) : std::nullopt);
    return list;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> tensors;
  with_tensors(value, [&](const at::Tensor& tensor) { return tensors.emplace_back(tensor); });
  return tensors;
}

// A number stays as it is, because meta kernels that are written in Python read it.
at::Tensor on_meta(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// Device memory where it lies; a tensor in host memory, such as a number, as it is at the launch.
at::Tensor for_kernel(const at::Tensor& tensor) {
  if (tensor.is_cuda()) return host_view(tensor);
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

template <class F>
Stack on_device(const Stack& arguments, c10::DeviceType type, F change) {
  Stack changed;
  for (const IValue& value : arguments)
    changed.push_back(value.isDevice() ? IValue(c10::Device(type)) : with_tensors(value, change));
  return changed;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(&stack);
}

bool holds_tensors(const c10::TypePtr& type) {
  if (auto list = type->cast<c10::ListType>()) return holds_tensors(list->getElementType());
  return type->kind() == c10::TypeKind::TensorType;
}

// Operators whose results have a size that depends on values.
const std::set<std::string> DEPENDS_ON_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2",       "aten::unique_dim",
    "aten::equal",   "aten::multinomial",   "aten::repeat_interleave", "aten::unique_consecutive", "aten::bincount"};

bool depends_on_values(const c10::FunctionSchema& schema) {
  if (schema.name() == "aten::repeat_interleave") return schema.overload_name() == "Tensor";
  if (DEPENDS_ON_VALUES.contains(schema.name())) return true;
  return !std::all_of(schema.returns().begin(), schema.returns().end(),
                      [](const c10::Argument& result) { return holds_tensors(result.type()); });
}

// Operators whose kernels on a GPU take types that the CPU's do not, or keep sums in more bits.
const std::set<std::string> COMPUTES_IN_MORE_BITS = {"aten::native_batch_norm", "aten::native_layer_norm_backward",
                                                     "aten::histc"};

at::Tensor in_more_bits(const at::Tensor& tensor) {
  if (at::isReducedFloatingType(tensor.scalar_type())) return tensor.to(at::kFloat);
  return at::isIntegralType(tensor.scalar_type(), true) ? tensor.to(at::kDouble) : tensor;
}

// One call of an operator on tensors of the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), schema_(op.schema()), stack_(stack) {
    size_t count = schema_.arguments().size();
    arguments_.assign(stack.end() - count, stack.end());
    stack.resize(stack.size() - count);
    c10::Device device(c10::DeviceType::CUDA, current_device());
    for (size_t i = 0; i < count; ++i)
      for (const at::Tensor& tensor : tensors_in(arguments_[i])) {
        (writes(schema_.arguments()[i]) ? written_ : read_).push_back(tensor);
        if (tensor.is_cuda()) device = tensor.device();
      }
    device_ = device;
    stream_ = current_stream(device.index());
    by_ = schema_.name() + " at " + calling_line();
  }

  void run() {
    bool in_place = std::all_of(schema_.returns().begin(), schema_.returns().end(),
                                [](const c10::Argument& result) { return writes(result); });
    if (depends_on_values(schema_)) return run_now();
    if (in_place) {
      size_outputs();
      for (const c10::Argument& result : schema_.returns()) stack_.push_back(argument_of(result));
      return queue({});
    }
    Stack inferred = on_device(arguments_, c10::DeviceType::Meta, on_meta);
    try {
      call(op_, inferred);
    } catch (const c10::Error& error) {
      count("errors", "no meta kernel of " + schema_.name() + ": " + error.what_without_backtrace());
      return run_now();
    }
    std::vector<at::Tensor> made;
    for (const IValue& result : inferred)
      stack_.push_back(with_tensors(result, [&](const at::Tensor& meta) {
        return made.emplace_back(at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device_)));
      }));
    queue(made);
  }

 private:
  static bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

  // The argument that a result of an operator in place is.
  const IValue& argument_of(const c10::Argument& result) const {
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (writes(schema_.arguments()[i]) && *schema_.arguments()[i].alias_info() == *result.alias_info())
        return arguments_[i];
    TORCH_CHECK(false, schema_.name(), " returns what it is not given");
  }

  // Give outputs of `out=` without elements the size of the result.
  void size_outputs() {
    bool has_unsized = false;
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (schema_.arguments()[i].is_out() && arguments_[i].isTensor()) has_unsized |= !arguments_[i].toTensor().numel();
    if (!has_unsized) return;
    Stack inferred = on_device(arguments_, c10::DeviceType::Meta, on_meta);
    call(op_, inferred);
    for (size_t i = 0; i < inferred.size() && i < schema_.returns().size(); ++i)
      if (inferred[i].isTensor())
        argument_of(schema_.returns()[i]).toTensor().resize_(inferred[i].toTensor().sizes());
  }

  // Random kernels: a generator of their own, seeded in launch order.
  Stack for_kernels() const {
    Stack arguments = on_device(arguments_, c10::DeviceType::CPU, for_kernel);
    for (size_t i = 0; i < arguments.size(); ++i)
      if (schema_.arguments()[i].name() == "generator") arguments[i] = at::detail::createCPUGenerator(next_seed());
    return arguments;
  }

  void check(Lock& lock, const MomentPtr& now, const std::vector<at::Tensor>& made) const {
    for (const at::Tensor& tensor : read_) check_tensor(lock, tensor, stream_, now, false, by_);
    for (const at::Tensor& tensor : written_) check_tensor(lock, tensor, stream_, now, true, by_);
    for (const at::Tensor& tensor : made) check_tensor(lock, tensor, stream_, now, true, by_);
  }

  void queue(const std::vector<at::Tensor>& made) {
    std::vector<at::Tensor> targets;
    for (const at::Tensor& tensor : made) targets.push_back(host_view(tensor));
    bool widens = COMPUTES_IN_MORE_BITS.contains(schema_.name());
    auto kernel = [op = op_, arguments = for_kernels(), targets, widens]() mutable {
      if (widens) arguments = on_device(arguments, c10::DeviceType::CPU, in_more_bits);
      call(op, arguments);
      if (targets.empty()) return;
      std::vector<at::Tensor> results;
      for (const IValue& result : arguments)
        for (const at::Tensor& tensor : tensors_in(result)) results.push_back(tensor);
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < targets.size(); ++i) {
        TORCH_CHECK(targets[i].sizes() == results[i].sizes() &&
                        (widens || targets[i].scalar_type() == results[i].scalar_type()),
                    "the meta kernel inferred ", targets[i].sizes(), ", the result has ", results[i].sizes());
        targets[i].copy_(results[i]);
      }
    };
    Lock lock(mutex());
    MomentPtr now = launch(lock, stream_, schema_.name().c_str(), std::move(kernel));
    check(lock, now, made);
  }

  // On the host, behind all that the stream has to do: what the caller needs the values for.
  void run_now() {
    count_wait(schema_.name());
    MomentPtr now;
    {
      Lock lock(mutex());
      now = launch(lock, stream_, schema_.name().c_str());
      check(lock, now, {});
    }
    await(now, schema_.name(), true);
    Stack results = for_kernels();
    call(op_, results);
    for (size_t i = 0; i < results.size(); ++i)
      if (writes(schema_.returns()[i]))
        stack_.push_back(argument_of(schema_.returns()[i]));
      else
        stack_.push_back(with_tensors(results[i], [&](const at::Tensor& tensor) { return moved(tensor); }));
  }

  at::Tensor moved(const at::Tensor& tensor) const {
    at::Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
    Lock lock(mutex());
    MomentPtr now = launch(lock, stream_, "result", [target = host_view(result), tensor] { target.copy_(tensor); });
    check(lock, now, {result});
    return result;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  Stack arguments_;
  std::vector<at::Tensor> read_, written_;
  c10::Device device_ = c10::Device(c10::DeviceType::CUDA);
  int stream_;
  std::string by_;
};

void run_on_stream(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  count("operators", op.schema().name());
  Call(op, *stack).run();
}

}  // namespace
}  // namespace emulated

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulated::run_on_stream>());
}

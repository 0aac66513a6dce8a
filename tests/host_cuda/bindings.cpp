// What host_cuda.py takes from core.cpp, and an "NCCL" that has gloo do its work on the same memory.

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

at::Generator host_cuda_generator(int);
at::Tensor host_cuda_on_host(const at::Tensor&);

namespace {

using c10::intrusive_ptr;
using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Handle = intrusive_ptr<Work>;

at::Tensor on_host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
  return host_cuda_on_host(tensor);
}

at::Tensor flat(const at::Tensor& tensor) {  // NCCL counts elements, gloo compares shapes
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  return on_host(tensor).view({-1});
}

Tensors on_host(const Tensors& tensors) {
  Tensors there;
  for (const auto& tensor : tensors)
    there.push_back(on_host(tensor));
  return there;
}

Lists on_host(const Lists& lists) {
  Lists there;
  for (const auto& tensors : lists)
    there.push_back(on_host(tensors));
  return there;
}

struct Nccl : Backend {
  std::string name;
  intrusive_ptr<Backend> inner;
  Nccl(intrusive_ptr<Backend> gloo, std::string called)
      : Backend(gloo->getRank(), gloo->getSize()), name(std::move(called)), inner(std::move(gloo)) {}
  const std::string getBackendName() const override {
    return name;
  }
  Handle broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    auto there = on_host(tensors);
    return inner->broadcast(there, options);
  }
  Handle allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    auto there = on_host(tensors);
    return inner->allreduce(there, options);
  }
  Handle allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    auto there = on_host(tensors);
    return inner->allreduce_coalesced(there, options);
  }
  Handle reduce(Tensors& tensors, const ReduceOptions& options) override {
    auto there = on_host(tensors);
    return inner->reduce(there, options);
  }
  Handle allgather(Lists& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return inner->allgather(out, in, options);
  }
  Handle _allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions& options) override {
    auto out = flat(output), in = flat(input);
    return inner->_allgather_base(out, in, options);
  }
  Handle gather(Lists& outputs, Tensors& inputs, const GatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return inner->gather(out, in, options);
  }
  Handle scatter(Tensors& outputs, Lists& inputs, const ScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return inner->scatter(out, in, options);
  }
  Handle reduce_scatter(Tensors& outputs, Lists& inputs, const ReduceScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return inner->reduce_scatter(out, in, options);
  }
  Handle _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& options) override {
    auto out = flat(output), in = flat(input);
    return inner->_reduce_scatter_base(out, in, options);
  }
  Handle alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputs, std::vector<int64_t>& inputs,
      const AllToAllOptions& options) override {
    auto out = on_host(output), in = on_host(input);
    return inner->alltoall_base(out, in, outputs, inputs, options);
  }
  Handle alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override {
    auto out = on_host(outputs), in = on_host(inputs);
    return inner->alltoall(out, in, options);
  }
  Handle send(Tensors& tensors, int to, int tag) override {
    auto there = on_host(tensors);
    return inner->send(there, to, tag);
  }
  Handle recv(Tensors& tensors, int from, int tag) override {
    auto there = on_host(tensors);
    return inner->recv(there, from, tag);
  }
  Handle barrier(const BarrierOptions& options) override {
    return inner->barrier(options);
  }
  void setSequenceNumberForGroup() override {
    inner->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return inner->getSequenceNumberForGroup();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner->setTimeout(timeout);
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("generator", host_cuda_generator);
  pybind11::class_<Nccl, intrusive_ptr<Nccl>, Backend>(m, "Nccl")
      .def(pybind11::init<intrusive_ptr<Backend>, std::string>())
      .def("_set_default_timeout", &Nccl::setTimeout, pybind11::call_guard<pybind11::gil_scoped_release>());
}

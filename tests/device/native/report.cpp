// See report.hpp.
#include "report.hpp"

#include <Python.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace emulated {
namespace {

std::mutex& own_mutex() {  // its own, because operations report with and without the device's
  static auto* mutex = new std::mutex();
  return *mutex;
}

std::map<std::string, std::map<std::string, int>>& counts() {
  static auto* counts = new std::map<std::string, std::map<std::string, int>>();
  return *counts;
}

constexpr std::array QUIET = {
    "/torch/",     "/deepspeed/", "/transformers/",  "contextlib",      "threading",       "/concurrent/", "<frozen",
    "<string>",    "runpy",       "device/cuda.py",  "device/group.py", "device/ranks.py", "device/rules.py",
    "device/instrument.py", "comm/sums.py"};

// "folder/file.py" of a code object, or nothing if its lines are not reported. The interpreter lock is held.
const std::string& reported_name(PyCodeObject* code) {
  static auto* names = new std::unordered_map<PyCodeObject*, std::string>();
  auto known = names->find(code);
  if (known != names->end()) return known->second;
  Py_INCREF(code);  // so that its address is not used again
  const char* text = PyUnicode_AsUTF8(code->co_filename);
  std::string name(text ? text : "");
  for (const char* part : QUIET)
    if (name.find(part) != std::string::npos) name.clear();
  size_t slash = name.rfind('/');
  if (slash != std::string::npos && slash) slash = name.rfind('/', slash - 1);
  if (slash != std::string::npos) name.erase(0, slash + 1);
  return names->emplace(code, name).first->second;
}

// True in a thread that Python has started. The main thread and autograd's, for which it waits, are none.
bool in_python_thread() {
  if (gettid() == getpid()) return false;
  PyGILState_STATE held = PyGILState_Ensure();
  bool found = false;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* name = PyUnicode_AsUTF8(code->co_name);
    found = name && !strcmp(name, "_bootstrap");
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  PyGILState_Release(held);
  return found;
}

}  // namespace

void count(const char* kind, const std::string& what) {
  std::lock_guard lock(own_mutex());
  ++counts()[kind][what];
}

int& sync_debug_mode() {
  static int mode = 0;
  return mode;
}

void count_wait(const std::string& why, bool torch_warns) {
  std::string text = why + " at " + calling_line();
  count(in_python_thread() ? "thread waits" : "waits", text);
  if (!torch_warns || !sync_debug_mode()) return;
  TORCH_CHECK(sync_debug_mode() < 2, "called a synchronizing CUDA operation: ", text);
  TORCH_WARN("called a synchronizing CUDA operation");
}

std::string calling_line() {
  if (!Py_IsInitialized()) return "";
  PyGILState_STATE held = PyGILState_Ensure();
  std::string lines;
  int found = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && found < 2) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const std::string& name = reported_name(code);
    if (!name.empty()) {
      if (found++) lines += " < ";
      lines += name + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(held);
  return lines.empty() ? "autograd" : lines;
}

std::string observations() {
  std::lock_guard lock(own_mutex());
  std::string text;
  for (auto& [kind, by_text] : counts())
    for (auto& [what, number] : by_text) {
      std::string line = what;
      for (char& letter : line)
        if (letter == '\n' || letter == '\t') letter = ' ';
      text += kind + "\t" + std::to_string(number) + "\t" + line + "\n";
    }
  return text;
}

void forget_observations() {
  std::lock_guard lock(own_mutex());
  counts().clear();
}

WithoutInterpreterLock::WithoutInterpreterLock() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutInterpreterLock::~WithoutInterpreterLock() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

}  // namespace emulated

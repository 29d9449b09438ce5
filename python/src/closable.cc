#include "closable.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <string>

namespace tensorferry::python {

namespace {

// Drops finished operations once held operations use this many bytes.
constexpr std::size_t sweep_bytes = std::size_t{256} << 20;

// For the end of the interpreter. Guarded by the GIL.
std::set<Closable*>& open_objects() {
  static auto& objects = *new std::set<Closable*>();
  return objects;
}

}  // namespace

Closable::Closable() { open_objects().insert(this); }
Closable::~Closable() { open_objects().erase(this); }

PyOperation Closable::hold(Operation operation, Moves moves, std::vector<Buffer> buffers) {
  auto held = std::make_shared<HeldOperation>(
      HeldOperation{std::move(operation), std::move(buffers), false, moves});
  if (closed()) {  // another thread has closed it meanwhile: the operation ends soon
    {
      const GilRelease released;
      held->reap();
    }
    held->let_go();
    return {std::move(held)};
  }
  held_.push_back(held);
  for (const Buffer& buffer : held->buffers) held_bytes_ += buffer.bytes().size();
  if (held_.size() >= sweep_at_ || held_bytes_ > sweep_bytes) sweep();
  return {std::move(held)};
}

bool Closable::finish_or_interrupt(Ending ending) {
  for (;;) {
    const bool hears_signals = on_main_thread();
    const auto deadline = hears_signals ? Clock::now() + signal_interval : Clock::time_point::max();
    if (finish(ending, deadline)) return true;
    if (PyErr_CheckSignals() != 0) return false;
  }
}

bool Closable::all_done(Clock::time_point deadline) const {
  const std::vector<std::shared_ptr<HeldOperation>> all = held_;
  for (const auto& held : all) {
    const GilRelease released;
    try {
      if (!held->operation.wait_until(deadline)) return false;
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): close() asks later how it ended
    }
  }
  return true;
}

void Closable::cancel_held() const noexcept {
  for (const auto& held : held_) held->operation.cancel();
}

void Closable::close() {
  if (closed()) return;
  closing_ = true;  // no new work, so that the wait ends
  if (!finish_or_interrupt(Ending::with_all)) throw nb::python_error();
  settle();
  if (const auto error = std::exchange(unseen_, std::nullopt)) throw Error(*error);
}

void Closable::end() {
  if (closed()) return;
  closing_ = true;
  std::optional<nb::python_error> interrupt;
  while (!finish_or_interrupt(Ending::with_writes)) {
    interrupt.emplace();
    cancel_all();
  }
  settle();
  if (interrupt) throw nb::python_error(*interrupt);
}

void Closable::end_quietly() noexcept {
  try {
    end();
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();
    } else {
      error.discard_as_unraisable("the end of a handle");
    }
  }
}

void Closable::settle() {
  const std::vector<std::shared_ptr<HeldOperation>> all = std::exchange(held_, {});
  {
    std::shared_ptr<void> ending = take_out();
    const GilRelease released;
    for (const auto& held : all) held->reap();
    ending.reset();
  }
  std::size_t cut_short = 0;
  for (const auto& held : all) {
    const auto error = held->seen ? std::nullopt : held->operation.error();
    if (error && error->code() == ECANCELED && held->moves == Moves::in) {
      ++cut_short;
    } else if (error) {
      keep_unseen(*error);
    }
    held->let_go();
  }
  if (cut_short == 1) {
    log("1 read was cancelled because its handle was ended");
  } else if (cut_short > 1) {
    log(std::to_string(cut_short) + " reads were cancelled because their handle was ended");
  }
}

void Closable::end_all() {
  std::optional<nb::python_error> interrupt;
  for (Closable* object : std::vector<Closable*>(open_objects().begin(), open_objects().end())) {
    if (!open_objects().contains(object)) continue;
    try {
      if (interrupt) object->cancel_all();
      object->end();
    } catch (nb::python_error& error) {
      interrupt.emplace(error);
    }
  }
  GilRelease::let_others_return();
  if (interrupt) throw nb::python_error(*interrupt);
}

void Closable::log(const std::string& text) noexcept {
  try {
    nb::module_::import_("logging")
        .attr("getLogger")("tensorferry")
        .attr("warning")("%s", shown(text));
  } catch (...) {  // a log handler that raises must not lose an operation
    PyErr_Clear();
  }
}

// close() raises the first; the log gets all.
void Closable::keep_unseen(const Error& error) noexcept {
  if (!unseen_) unseen_ = error;
  log(std::string("an operation failed that nobody waited for: ") + error.what());
}

// Lets go of memory last, when all members are consistent: finalizers may call back.
void Closable::sweep() {
  std::vector<std::shared_ptr<HeldOperation>> done;
  std::erase_if(held_, [&done](const std::shared_ptr<HeldOperation>& held) {
    if (!held->operation.done()) return false;
    done.push_back(held);
    // Keeps a failed one while the user may still ask.
    return held->seen || held.use_count() == 2 || !held->operation.error();
  });
  sweep_at_ = std::max<std::size_t>(64, 2 * held_.size());
  held_bytes_ = 0;
  for (const auto& held : done) {
    const bool forgotten = !held->seen && held.use_count() == 1;
    const auto error = forgotten ? held->operation.error() : std::nullopt;
    if (error) keep_unseen(*error);
    held->let_go();
  }
}

}  // namespace tensorferry::python

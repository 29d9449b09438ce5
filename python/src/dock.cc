#include "dock.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <string>

namespace tensorferry::python {

namespace {

// So much memory may wait to be let go of.
constexpr std::size_t sweep_bytes = std::size_t{256} << 20;

// For the end of the interpreter. Guarded by the GIL.
std::set<Dock*>& live_docks() {
  static auto& docks = *new std::set<Dock*>();
  return docks;
}

}  // namespace

Dock::Dock() { live_docks().insert(this); }
Dock::~Dock() { live_docks().erase(this); }

PyOperation Dock::launch(std::shared_ptr<Flight> flight) {
  if (closed()) {  // while the operation was started: it ends with what was opened
    {
      const Unlocked unlocked;
      flight->reap();
    }
    flight->let_go();
    return {std::move(flight)};
  }
  flights_.push_back(flight);
  for (const Buffer& buffer : flight->buffers) launched_bytes_ += buffer.bytes().size();
  if (flights_.size() >= sweep_at_ || launched_bytes_ > sweep_bytes) sweep();
  return {std::move(flight)};
}

PyOperation Dock::launch(Operation operation, Moves moves, std::vector<Buffer> buffers) {
  return launch(
      std::make_shared<Flight>(Flight{std::move(operation), std::move(buffers), false, moves}));
}

bool Dock::finish_or_interrupt(Ending ending) {
  for (;;) {
    const bool hears_signals = on_main_thread();
    const auto deadline = hears_signals ? Clock::now() + signal_interval : Clock::time_point::max();
    if (finish(ending, deadline)) return true;
    if (PyErr_CheckSignals() != 0) return false;
  }
}

bool Dock::landed(Clock::time_point deadline) const {
  const std::vector<std::shared_ptr<Flight>> flights = flights_;
  for (const auto& flight : flights) {
    const Unlocked unlocked;
    try {
      if (!flight->operation.wait_until(deadline)) return false;
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): close() asks later how it ended
    }
  }
  return true;
}

void Dock::cancel_flights() const noexcept {
  for (const auto& flight : flights_) flight->operation.cancel();
}

void Dock::close() {
  if (closed()) return;
  closing_ = true;  // no new work: the wait shall have an end
  if (!finish_or_interrupt(Ending::with_all)) throw nb::python_error();
  settle();
  if (const auto error = std::exchange(unseen_, std::nullopt)) throw Error(*error);
}

void Dock::end() {
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

void Dock::end_quietly() noexcept {
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

void Dock::settle() {
  const std::vector<std::shared_ptr<Flight>> flights = std::exchange(flights_, {});
  {
    std::shared_ptr<void> ending = take_out();
    const Unlocked unlocked;
    for (const auto& flight : flights) flight->reap();
    ending.reset();
  }
  std::size_t cut_short = 0;
  for (const auto& flight : flights) {
    const auto error = flight->seen ? std::nullopt : flight->operation.error();
    if (error && error->code() == ECANCELED && flight->moves == Moves::in) {
      ++cut_short;
    } else if (error) {
      keep_unseen(*error);
    }
    flight->let_go();
  }
  if (cut_short == 1) {
    log("1 read was cancelled because its handle was ended");
  } else if (cut_short > 1) {
    log(std::to_string(cut_short) + " reads were cancelled because their handle was ended");
  }
}

void Dock::end_all() {
  std::optional<nb::python_error> interrupt;
  for (Dock* dock : std::vector<Dock*>(live_docks().begin(), live_docks().end())) {
    if (!live_docks().contains(dock)) continue;
    try {
      if (interrupt) dock->cancel_all();
      dock->end();
    } catch (nb::python_error& error) {
      interrupt.emplace(error);
    }
  }
  Unlocked::let_others_return();
  if (interrupt) throw nb::python_error(*interrupt);
}

void Dock::log(const std::string& text) noexcept {
  try {
    nb::module_::import_("logging")
        .attr("getLogger")("tensorferry")
        .attr("warning")("%s", shown(text));
  } catch (...) {  // a handler of the log that raises must not lose an operation
    PyErr_Clear();
  }
}

// The first is raised by close(); all are logged.
void Dock::keep_unseen(const Error& error) noexcept {
  if (!unseen_) unseen_ = error;
  log(std::string("an operation failed that nobody waited for: ") + error.what());
}

// Python may run only at the end, when everything is in its place: finalizers may call back.
void Dock::sweep() {
  std::vector<std::shared_ptr<Flight>> done;
  std::erase_if(flights_, [&done](const std::shared_ptr<Flight>& flight) {
    if (!flight->operation.done()) return false;
    done.push_back(flight);
    // One that failed is kept while the user may still ask.
    return flight->seen || flight.use_count() == 2 || !flight->operation.error();
  });
  sweep_at_ = std::max<std::size_t>(64, 2 * flights_.size());
  launched_bytes_ = 0;
  for (const auto& flight : done) {
    const bool forgotten = !flight->seen && flight.use_count() == 1;
    const auto error = forgotten ? flight->operation.error() : std::nullopt;
    if (error) keep_unseen(*error);
    flight->let_go();
  }
}

}  // namespace tensorferry::python

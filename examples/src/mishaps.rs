//! The faults of the examples. The index of an order in the file decides its fault, so each run has the same faults.

use crate::Event;

/// The fault of a charge on its way to the payment provider and back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mishap {
    /// No fault.
    None,
    /// The provider can't be reached; no customer is charged.
    Unreachable,
    /// The customer is charged, but the answer is lost.
    AnswerLost,
    /// The provider takes longer than the broker waits for an acknowledgement, so the message is delivered again in the
    /// meantime.
    Slow,
    /// The customer is charged, and then the worker dies with all its running calls.
    WorkerDies,
}

impl Mishap {
    /// Returns the fault of a charge for `event`; only the first charge of an event has a fault.
    pub fn of(event: &Event, is_first: bool) -> Self {
        match event.index {
            _ if !is_first => Self::None,
            // Only orders of the first 2,000 events kill a worker, because each death takes time.
            index @ ..2_000 if index % 500 == 5 => Self::WorkerDies,
            index @ ..2_000 if index % 200 == 2 => Self::Slow,
            index if index % 20 == 1 => Self::Unreachable,
            index if index % 20 == 11 => Self::AnswerLost,
            _ => Self::None,
        }
    }
}

/// Returns the messages of a producer that publishes an event again when the producer is in doubt: every tenth event
/// twice in a row, and every 25th event once more at the end.
pub fn deliveries(events: &[Event]) -> impl Iterator<Item = &Event> {
    let in_order =
        events.iter().flat_map(|event| std::iter::repeat_n(event, if event.index % 10 == 2 { 2 } else { 1 }));
    in_order.chain(events.iter().step_by(25))
}

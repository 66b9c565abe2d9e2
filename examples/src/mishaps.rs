//! Everything that goes wrong, decided by an order's place in the file: two runs meet the same mishaps.

use crate::Event;

/// What happens to a charge on its way to the payment provider and back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mishap {
    /// Nothing.
    None,
    /// The provider can't be reached; nobody is charged.
    Unreachable,
    /// The customer is charged, but the answer is lost.
    AnswerLost,
    /// The provider takes longer than the broker waits for an acknowledgement, so the message is delivered again
    /// meanwhile.
    Slow,
    /// The customer is charged, and then the worker dies with everything it has in hand.
    WorkerDies,
}

impl Mishap {
    /// What happens to a charge for `event`, the first one or a later one.
    pub fn of(event: &Event, is_first: bool) -> Self {
        match event.index {
            _ if !is_first => Self::None,
            // Few, however long the file is: each takes time.
            index @ ..2_000 if index % 500 == 5 => Self::WorkerDies,
            index @ ..2_000 if index % 200 == 2 => Self::Slow,
            index if index % 20 == 1 => Self::Unreachable,
            index if index % 20 == 11 => Self::AnswerLost,
            _ => Self::None,
        }
    }
}

/// The messages that a producer publishes which is not sure whether an earlier try got through: every tenth event twice in
/// a row, every 25th once more at the end.
pub fn deliveries(events: &[Event]) -> impl Iterator<Item = &Event> {
    let in_order =
        events.iter().flat_map(|event| std::iter::repeat_n(event, if event.index % 10 == 2 { 2 } else { 1 }));
    in_order.chain(events.iter().step_by(25))
}

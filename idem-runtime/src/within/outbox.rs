//! Messages of the calls in a transaction, which leave after its commit.

use std::sync::Arc;

use super::turns::CallNode;
use crate::engine::{CommittedRecord, ErrorFacts, TransactionEnd, send_committed, send_unrecorded, settle};
use crate::error::{Disposition, Error};
use crate::key::Key;
use crate::policy::Backoff;
use crate::record::messages::OutgoingMessage;
use crate::store::Store;

/// Messages of the calls in one transaction, in the order in which the calls returned.
#[derive(Default)]
pub(super) struct CommitOutbox(Vec<CallMessages>);

/// Messages of one call.
struct CallMessages {
    call: Arc<CallNode>,
    /// Store whose sender publishes the messages.
    store: Arc<dyn Store>,
    place: MessagePlace,
}

enum MessagePlace {
    /// The record of the operation.
    Record(CommittedRecord),
    /// No record: the body ran without a reservation, or in shadow mode.
    Here(Key, Vec<OutgoingMessage>),
}

impl CommitOutbox {
    /// Notes that `record` has messages that are not sent.
    pub(super) fn recorded(&mut self, call: &Arc<CallNode>, store: &Arc<dyn Store>, record: CommittedRecord) {
        let is_same = |it: &CallMessages| match &it.place {
            MessagePlace::Record(known) => {
                // Tables of two tenants may have equal keys.
                (&known.key, known.written_by) == (&record.key, record.written_by) && Arc::ptr_eq(&it.store, store)
            }
            MessagePlace::Here(..) => false,
        };
        if !self.0.iter().any(is_same) {
            let place = MessagePlace::Record(record);
            self.0.push(CallMessages { call: Arc::clone(call), store: Arc::clone(store), place });
        }
    }

    /// Takes a message that no record holds.
    pub(super) fn unrecorded(
        &mut self,
        call: Arc<CallNode>,
        store: &Arc<dyn Store>,
        key: &Key,
        message: OutgoingMessage,
    ) {
        if let Some(CallMessages { call: last, place: MessagePlace::Here(_, messages), .. }) = self.0.last_mut()
            && Arc::ptr_eq(last, &call)
        {
            messages.push(message);
            return;
        }
        let place = MessagePlace::Here(key.clone(), vec![message]);
        self.0.push(CallMessages { call, store: Arc::clone(store), place });
    }

    /// Forgets the messages of `call` and of the calls in its body, whose writes are undone.
    pub(super) fn forget(&mut self, call: &CallNode) {
        self.0.retain(|messages| !messages.call.is_or_is_inside(call));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sends the messages, after the commit, and settles the delivery. A delivery that is dropped meanwhile is not
    /// acknowledged.
    pub(super) async fn send(self) {
        let seed = self.0.first().map_or(0, |messages| match &messages.place {
            MessagePlace::Record(CommittedRecord { key, .. }) | MessagePlace::Here(key, _) => key.seed(),
        });
        let disposition = Disposition::Retry { after: Backoff::DEFAULT.after(1, seed) };
        settle(TransactionEnd::Unsent(ErrorFacts { disposition, misconfigured: false, store_failed: false }));
        let mut failure: Option<Error> = None;
        for CallMessages { store, place, .. } in &self.0 {
            let sent = match place {
                MessagePlace::Record(record) => send_committed(&**store, record).await,
                MessagePlace::Here(key, messages) => send_unrecorded(&**store, key, messages).await,
            };
            failure = failure.or(sent.err());
        }
        settle(match failure {
            Some(error) => TransactionEnd::Unsent(ErrorFacts::of(&error)),
            None => TransactionEnd::Committed,
        });
    }
}

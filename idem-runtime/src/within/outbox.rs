//! Messages of the calls in a transaction, which leave after its commit.

use std::sync::Arc;

use super::turns::CallNode;
use crate::engine::{ErrorFacts, TransactionEnd, send_committed, send_unrecorded, settle};
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
    key: Key,
    place: MessagePlace,
}

enum MessagePlace {
    /// The record of the operation. `ran`: the body ran in this transaction.
    Record { ran: bool },
    /// No record: the body ran without a reservation, or in shadow mode.
    Here(Vec<OutgoingMessage>),
}

impl CommitOutbox {
    /// Notes that the record of `key` has messages that are not sent. `ran`: the body ran in this transaction.
    pub(super) fn recorded(&mut self, call: &Arc<CallNode>, store: &Arc<dyn Store>, key: &Key, ran: bool) {
        let is_known = |it: &CallMessages| it.key == *key && matches!(it.place, MessagePlace::Record { .. });
        if !self.0.iter().any(is_known) {
            let (call, store, key) = (Arc::clone(call), Arc::clone(store), key.clone());
            self.0.push(CallMessages { call, store, key, place: MessagePlace::Record { ran } });
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
        if let Some(CallMessages { call: last, place: MessagePlace::Here(messages), .. }) = self.0.last_mut()
            && Arc::ptr_eq(last, &call)
        {
            messages.push(message);
            return;
        }
        let place = MessagePlace::Here(vec![message]);
        self.0.push(CallMessages { call, store: Arc::clone(store), key: key.clone(), place });
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
        let seed = self.0.first().map_or(0, |messages| messages.key.seed());
        let disposition = Disposition::Retry { after: Backoff::DEFAULT.after(1, seed) };
        settle(TransactionEnd::Unsent(ErrorFacts { disposition, misconfigured: false, store_failed: false }));
        let mut failure: Option<Error> = None;
        for CallMessages { store, key, place, .. } in &self.0 {
            let sent = match place {
                MessagePlace::Record { ran } => send_committed(&**store, key, *ran).await,
                MessagePlace::Here(messages) => send_unrecorded(&**store, key, messages).await,
            };
            failure = failure.or(sent.err());
        }
        settle(match failure {
            Some(error) => TransactionEnd::Unsent(ErrorFacts::of(&error)),
            None => TransactionEnd::Committed,
        });
    }
}

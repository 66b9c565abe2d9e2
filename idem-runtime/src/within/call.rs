//! Future of a call in a transaction. This future polls the engine and answers the engine's requests.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::sync::mpsc;

use super::mailbox::MailboxRequest;
use super::open::TransactionNotes;
use super::savepoint::{SavepointScope, Undo};
use super::turns::{CallNode, PolledCall};
use crate::engine::{Operation, Recorder};
use crate::error::Error;
use crate::store::Store;
use crate::store::transaction::TransactionStore;

/// Storage of an [`Operation`] whose record is inside of a transaction; see
/// [`Within::operation`](super::Within::operation).
pub struct InTransaction<'a, C> {
    pub(super) asked: mpsc::UnboundedReceiver<MailboxRequest>,
    pub(super) transaction: C,
    pub(super) notes: &'a TransactionNotes,
    /// True if the writes of a body that does not complete are undone; false in shadow mode.
    pub(super) undoes: bool,
    /// Store whose sender publishes the messages of the call after the commit.
    pub(super) outbox: Option<Arc<dyn Store>>,
}

impl<C> fmt::Debug for InTransaction<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InTransaction")
    }
}

impl<R, C: TransactionStore> Operation<R, InTransaction<'_, C>> {
    /// Runs `body` once for the key of the operation, and replays its recorded result to every duplicate. The
    /// transaction is left open; see [`Within`](super::Within).
    ///
    /// # Errors
    /// The error of `body`, or an [`Error`] with the reason why there is no result.
    ///
    /// # Panics
    /// If `body` panics.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the body, and undoes its writes through the transaction.
    pub fn run<T, E, B>(self, body: B) -> impl Future<Output = Result<T, E>>
    where
        R: Recorder<T, E>,
        E: From<Error>,
        B: Future<Output = Result<T, E>>,
    {
        let (operation, InTransaction { asked, transaction, notes, undoes, outbox }) = self.at(());
        let scene = Arc::new(SavepointScope::new(transaction, notes, undoes, outbox));
        let doer = Arc::clone(&scene);
        TransactionCall {
            asked,
            act: move |act| perform(Arc::clone(&doer), act),
            acting: None,
            run: operation.run(body),
            result: None,
            node: None,
            _undo: Undo(scene),
        }
    }
}

pin_project! {
    /// A call, and the answers to the requests of its engine.
    struct TransactionCall<F, A, R: Future, U> {
        // The receiver is dropped before the engine, so that the engine's late writes find the mailbox closed.
        asked: mpsc::UnboundedReceiver<MailboxRequest>,
        act: F,
        #[pin]
        acting: Option<A>,
        #[pin]
        run: R,
        result: Option<R::Output>,
        node: Option<Arc<CallNode>>,
        // The guard is dropped after the body, and after the calls inside of the body.
        _undo: U,
    }
}

/// Next action of a call in its transaction.
#[expect(clippy::large_enum_variant, reason = "there is one at a time, and most are answers")]
enum NextAction {
    Answer(MailboxRequest),
    /// The call is over.
    End,
}

impl<F, A, R, U> Future for TransactionCall<F, A, R, U>
where
    F: Fn((NextAction, Arc<CallNode>)) -> A,
    A: Future<Output = ()>,
    R: Future,
{
    type Output = R::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<R::Output> {
        loop {
            let mut this = self.as_mut().project();
            if let Some(acting) = this.acting.as_mut().as_pin_mut() {
                ready!(acting.poll(cx));
                this.acting.set(None);
            }
            if let Some(result) = this.result.take() {
                return Poll::Ready(result);
            }
            let node = this.node.get_or_insert_with(CallNode::new);
            let polled = {
                let _inside = PolledCall::enter(node);
                this.run.poll(cx)
            };
            let act = match polled {
                Poll::Ready(result) => {
                    *this.result = Some(result);
                    NextAction::End
                }
                Poll::Pending => match ready!(this.asked.poll_recv(cx)) {
                    Some(ask) => NextAction::Answer(ask),
                    // Does not happen: the engine keeps the mailbox open for as long as it runs.
                    None => return Poll::Pending,
                },
            };
            this.acting.set(Some((this.act)((act, Arc::clone(node)))));
        }
    }
}

async fn perform<C: TransactionStore>(scene: Arc<SavepointScope<'_, C>>, (act, node): (NextAction, Arc<CallNode>)) {
    match act {
        NextAction::Answer(ask) => match scene.take_turn(&node).await {
            Ok(()) => scene.answer(ask).await,
            Err(error) => ask.refuse(error),
        },
        NextAction::End => scene.end().await,
    }
}

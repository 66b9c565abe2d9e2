//! Finds the node of a cluster that serves a key.
//!
//! - One node serves each of the 16 384 slots. The store has separate connections and batches for each node, so that a
//!   node that hangs delays only its own keys.
//! - A node that does not serve a slot answers with a redirect and writes nothing. The operation follows the redirect,
//!   up to six redirects in total.
//! - The store asks the nodes (up to 16 per round) for the map of slots after every failure, and every five seconds.
//!   The map of the latest epoch wins, so a node that was cut off can't bring back an old map. The answer to an
//!   operation is not trusted if the slot of its key has moved to another node meanwhile.

mod slots;
mod view;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::Poll;
use std::time::Duration;

use redis::{Client, ConnectionAddr, ConnectionInfo, RedisError};
use tokio::sync::{Notify, watch};

use self::slots::SLOTS;
pub(super) use self::slots::slot_of;
use self::view::{Address, Redirect, View};
use super::command::Name;
use super::connection::elsewhere;
use super::failure::ExchangeFailure;
use super::limits::Limits;
use super::node::Node;
use super::op::{Op, OpAnswer};
use super::place::{ServerConnection, ServerPlace};
use super::requirements::prepare;
use super::task::OwnedTask;
use super::terms::ExchangeTerms;
use crate::combine::{all, race};
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::{PerProcess, lock};

/// Largest number of redirects that an operation follows.
const REDIRECTS: usize = 6;
/// Largest number of nodes that one round asks for the map of slots.
const ASKED: usize = 16;
/// Time limit for the answers of nodes. A node that hangs must not hold back the answers of other nodes.
const PATIENCE: Duration = Duration::from_millis(500);
/// Shortest pause between two rounds of asking for the map.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval between two rounds of asking for the map, while nothing fails.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// The nodes that the user named, and the latest view of the cluster that any runtime has received.
pub(super) struct NodeNames {
    nodes: Vec<Client>,
    /// Settings of a connection to a node, except for its address.
    template: ConnectionInfo,
    seen: PerProcess<Mutex<Option<Arc<View>>>>,
}

impl NodeNames {
    /// Notes the nodes that the user named. All connections to the cluster have the settings of `first`.
    pub(super) fn new(first: &Client, nodes: Vec<Client>) -> Self {
        Self { template: first.get_connection_info().clone(), nodes, seen: PerProcess::default() }
    }
}

/// The known state of a cluster, and one runtime's connections to its nodes.
pub(super) struct Cluster {
    named: Arc<NodeNames>,
    terms: ExchangeTerms,
    for_upkeep: bool,
    map: Mutex<Map>,
    /// Notified when the map may be out of date.
    doubt: Arc<Notify>,
    /// True once a view of the cluster has arrived.
    heard: watch::Sender<bool>,
    asking: OnceLock<OwnedTask>,
    /// Counter that selects the next node to ask, to try, or to subscribe to.
    turn: AtomicUsize,
}

struct Map {
    epoch: u64,
    slots: Vec<Option<Arc<Member>>>,
    /// The seeds and all nodes of the latest view, by address.
    members: HashMap<Address, Arc<Member>>,
    /// The nodes that the user named, which are asked even if no view contains them.
    seeds: Vec<Arc<Member>>,
}

/// A node of the cluster.
pub(super) struct Member {
    address: Address,
    client: Client,
    node: Node,
}

impl Member {
    pub(super) fn connection(&self) -> &ServerConnection {
        self.node.connection()
    }

    pub(super) fn node(&self) -> &Node {
        &self.node
    }

    /// Returns the address as a text.
    pub(super) fn name(&self) -> String {
        let (host, port) = &self.address;
        format!("{host}:{port}")
    }
}

impl Cluster {
    /// Makes the cluster of the nodes in `named`, starting from the latest view that any runtime has received.
    pub(super) fn new(named: &Arc<NodeNames>, terms: ExchangeTerms, for_upkeep: bool) -> Arc<Self> {
        let map = Map { epoch: 0, slots: vec![None; SLOTS.into()], members: HashMap::new(), seeds: Vec::new() };
        let cluster = Self {
            named: Arc::clone(named),
            terms,
            for_upkeep,
            map: Mutex::new(map),
            doubt: Arc::default(),
            heard: watch::channel(false).0,
            asking: OnceLock::new(),
            turn: AtomicUsize::new(0),
        };
        named.nodes.iter().for_each(|node| cluster.meet(node));
        let seen = lock(named.seen.here()).clone();
        if let Some(seen) = seen {
            cluster.learn(&seen);
        }
        Arc::new(cluster)
    }

    /// Adds the node at the address of `client` as a seed.
    fn meet(&self, client: &Client) {
        if let ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } =
            client.get_connection_info().addr()
        {
            let mut map = lock(&self.map);
            if let Ok(seed) = self.member(&mut map, (host.clone(), *port)) {
                map.seeds.push(seed);
            }
        }
    }

    /// Returns the nodes that serve slots.
    pub(super) fn primaries(&self) -> Vec<Arc<Member>> {
        let map = lock(&self.map);
        let mut primaries: Vec<Arc<Member>> = Vec::new();
        for member in map.slots.iter().flatten() {
            if !primaries.iter().any(|known| Arc::ptr_eq(known, member)) {
                primaries.push(Arc::clone(member));
            }
        }
        primaries
    }

    /// Checks that the primaries are usable; at least one of them must be reachable. Returns the size limits that hold
    /// for all primaries.
    pub(super) async fn prepare(&self, prefix: &str) -> Result<Arc<Limits>, StoreError> {
        let primaries = self.primaries();
        let limits = Arc::new(Limits::default());
        let tries: Vec<_> = primaries
            .iter()
            .map(|primary| {
                let limits = Arc::clone(&limits);
                Box::pin(async move {
                    let (_, of_one) =
                        prepare(primary.connection(), true, prefix, self.terms.replicas.is_some()).await?;
                    limits.configure_from(&of_one);
                    Ok(())
                })
            })
            .collect();
        if tries.is_empty() {
            let message = "the cluster is down: no node serves its slots";
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        let (usable, mut rest) = first(tries).await;
        usable?;
        // One primary is usable. All other primaries have the time [`PATIENCE`] to report a misconfiguration. An
        // unreachable primary is no error, because the store also tolerates a primary that becomes unreachable later.
        let prepared = race(all(&mut rest), self.terms.clock.sleep(PATIENCE)).await;
        let mut mistakes = prepared.into_iter().flatten().filter_map(Result::err);
        match mistakes.find(|error| error.kind() == StoreErrorKind::Misconfigured) {
            Some(mistake) => Err(mistake),
            None => Ok(limits),
        }
    }

    /// Starts the task that asks the nodes for the map of slots until the cluster is dropped.
    pub(super) fn keep_asking(self: &Arc<Self>) {
        let (this, doubt, clock) = (Arc::downgrade(self), Arc::clone(&self.doubt), Arc::clone(&self.terms.clock));
        let asking = async move {
            loop {
                race(doubt.notified(), clock.sleep(ASK_AGAIN)).await;
                let Some(this) = Weak::upgrade(&this) else { return };
                this.ask().await;
                drop(this);
                clock.sleep(PAUSE).await;
            }
        };
        self.asking.get_or_init(|| OwnedTask(tokio::spawn(asking).abort_handle()));
        // The view that another runtime received may be out of date.
        self.doubt.notify_one();
    }

    /// Asks the nodes for the map of slots.
    pub(super) async fn ask(&self) {
        let members: Vec<_> = {
            let map = lock(&self.map);
            let turn = self.turn.fetch_add(1, Ordering::Relaxed) % map.members.len().max(1);
            map.members.values().cycle().skip(turn).take(map.members.len().min(ASKED)).cloned().collect()
        };
        let mut asked: Vec<_> = members
            .iter()
            .map(|member| {
                Box::pin(async move {
                    // A view is used as soon as it arrives, before slower nodes have answered.
                    if let Some(view) = View::ask(member.connection(), &member.address.0).await {
                        self.learn(&Arc::new(view));
                    }
                })
            })
            .collect();
        race(all(&mut asked), self.terms.clock.sleep(PATIENCE)).await;
    }

    fn learn(&self, view: &Arc<View>) {
        let mut map = lock(&self.map);
        if view.epoch < map.epoch {
            return;
        }
        *lock(self.named.seen.here()) = Some(Arc::clone(view));
        map.epoch = view.epoch;
        let mut heard: HashMap<_, _> = map.seeds.iter().map(|seed| (seed.address.clone(), Arc::clone(seed))).collect();
        map.slots.fill(None);
        for range in &view.ranges {
            for (i, address) in range.nodes.iter().enumerate() {
                let Ok(member) = self.member(&mut map, address.clone()) else { continue };
                if i == 0 {
                    map.slots[usize::from(range.first)..=usize::from(range.last)].fill(Some(Arc::clone(&member)));
                }
                heard.insert(address.clone(), member);
            }
        }
        map.members = heard;
        self.heard.send_replace(true);
    }

    fn member(&self, map: &mut Map, address: Address) -> Result<Arc<Member>, RedisError> {
        if let Some(member) = map.members.get(&address) {
            return Ok(Arc::clone(member));
        }
        let client = elsewhere(&self.named.template, &address.0, address.1)?;
        let place = ServerPlace::At(Box::new(client.clone()));
        let connect = |timeout| ServerConnection::ours(place.clone(), Arc::clone(&self.terms.clock), timeout);
        let node = Node::new(None, connect, &self.terms, self.for_upkeep);
        let member = Arc::new(Member { address: address.clone(), client, node });
        map.members.insert(address, Arc::clone(&member));
        Ok(member)
    }

    /// Returns the node that serves `slot`. If that node is unknown, returns any node, which redirects the operation.
    async fn owner(&self, slot: u16) -> Option<Arc<Member>> {
        if let Some(member) = self.known_owner(slot) {
            return Some(member);
        }
        self.hear().await;
        self.known_owner(slot).or_else(|| {
            let map = lock(&self.map);
            // Each call selects a different node, because a node may be unreachable.
            let turn = self.turn.fetch_add(1, Ordering::Relaxed) % map.members.len().max(1);
            map.members.values().nth(turn).cloned()
        })
    }

    fn known_owner(&self, slot: u16) -> Option<Arc<Member>> {
        lock(&self.map).slots[usize::from(slot)].clone()
    }

    /// Returns whether `member` serves `slot`, by the present map; true while no view has arrived.
    fn is_owner(&self, member: &Arc<Member>, slot: u16) -> bool {
        match self.known_owner(slot) {
            Some(now) => Arc::ptr_eq(&now, member),
            None => !*self.heard.borrow(),
        }
    }

    /// Waits for the first view of the cluster, up to [`PATIENCE`].
    async fn hear(&self) {
        let mut heard = self.heard.subscribe();
        if !*heard.borrow() {
            self.doubt.notify_one();
            race(heard.wait_for(|heard| *heard), self.terms.clock.sleep(PATIENCE)).await;
        }
    }

    /// Returns the client of the next node, for a subscription: a publication reaches all nodes.
    pub(super) fn some_client(&self) -> Option<Client> {
        let map = lock(&self.map);
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % map.members.len().max(1);
        map.members.values().nth(turn).map(|member| member.client.clone())
    }

    /// Runs `op` on the node that serves `name`.
    pub(super) async fn run(&self, name: Name<'_>, op: Op<'_>) -> OpAnswer {
        let slot = slot_of(name);
        let Some(mut member) = self.owner(slot).await else {
            self.doubt.notify_one();
            return Err(ExchangeFailure::NotSent("no node of the cluster is known".into()));
        };
        let mut asking = false;
        // Follows redirects until a node runs the operation.
        let mut followed = 0;
        loop {
            let answer = match asking {
                true => member.node.run_asking(op.clone()).await,
                false => member.node.run(op.clone()).await,
            };
            let redirect = answer.as_ref().err().and_then(|failure| Redirect::read(failure, &member.address.0));
            match redirect {
                Some(redirect) if followed < REDIRECTS => {
                    followed += 1;
                    let mut map = lock(&self.map);
                    let Ok(next) = self.member(&mut map, redirect.to) else { return answer };
                    asking = redirect.asking;
                    if !asking {
                        map.slots[usize::from(slot)] = Some(Arc::clone(&next));
                        self.doubt.notify_one();
                    }
                    member = next;
                }
                _ => {
                    match &answer {
                        // The slot has moved to another node. A primary that was paused during a failover still answers
                        // when it resumes, but discards its writes as soon as it follows the new primary.
                        Ok(_) if !asking && !self.is_owner(&member, slot) => {
                            return Err(ExchangeFailure::Lost);
                        }
                        Err(failure) if !failure.is_unknown_script() => self.doubt.notify_one(),
                        _ => {}
                    }
                    return answer;
                }
            }
        }
    }
}

/// Runs `tries` concurrently until one try succeeds or shows a misconfiguration. Returns the result of that try, or the
/// last error, and the unfinished tries.
pub(super) async fn first<T, F: Future<Output = Result<T, StoreError>> + Unpin>(
    mut tries: Vec<F>,
) -> (Result<T, StoreError>, Vec<F>) {
    let mut last = Err(StoreError::new(StoreErrorKind::Unavailable, "no node of the cluster can be reached"));
    std::future::poll_fn(|cx| {
        let mut at = 0;
        while let Some(one) = tries.get_mut(at) {
            let Poll::Ready(answer) = Pin::new(one).poll(cx) else {
                at += 1;
                continue;
            };
            drop(tries.remove(at));
            let decides = answer.as_ref().map_or_else(|error| error.kind() == StoreErrorKind::Misconfigured, |_| true);
            last = answer;
            if decides {
                return Poll::Ready(());
            }
        }
        if tries.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    (last, tries)
}

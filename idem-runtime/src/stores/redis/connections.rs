//! The connections of one runtime to the servers of a store, and the plan by which a runtime opens them.

use std::sync::Arc;
use std::time::Duration;

use redis::{Client, ConnectionInfo};

use super::cluster::{Cluster, NodeNames};
use super::connection::UserConnection;
use super::node::Node;
use super::place::{ServerConnection, ServerPlace};
use super::route::Route;
use super::sentinel::Sentinels;
use super::task::OwnedTask;
use super::terms::ExchangeTerms;
use super::wake::{PublicationSource, Wakeups};
use crate::clock::Clock;

/// One runtime's connections to a store.
pub(super) struct Connections {
    pub(super) route: Route,
    pub(super) wakeups: Wakeups,
}

impl Connections {
    fn new(route: Route, source: Option<PublicationSource>, terms: &ExchangeTerms) -> Self {
        Self { route, wakeups: Wakeups::new(source, &terms.channel) }
    }

    pub(super) fn of_cluster(cluster: Arc<Cluster>, terms: &ExchangeTerms) -> Self {
        let source = PublicationSource::Cluster(Arc::clone(&cluster));
        Self::new(Route::Cluster(cluster), Some(source), terms)
    }
}

/// The settings from which each runtime opens its connections.
pub(super) enum ConnectPlan {
    /// All operations use the user's own connection.
    Theirs(UserConnection),
    At(Box<Client>),
    /// The primary that these sentinels call `name`. The address in `template` is ignored.
    Sentinels {
        sentinels: Vec<Client>,
        name: String,
        template: Box<ConnectionInfo>,
    },
    Cluster(Arc<NodeNames>),
}

impl ConnectPlan {
    /// Opens the connections of the current runtime.
    pub(super) fn open(&self, terms: &ExchangeTerms, for_upkeep: bool) -> Connections {
        match self {
            Self::Theirs(theirs) => {
                let connect = |timeout| ServerConnection::theirs(theirs.clone(), Arc::clone(&terms.clock), timeout);
                let node = Node::new(None, connect, terms, for_upkeep);
                Connections::new(Route::One(node, Vec::new()), None, terms)
            }
            Self::At(client) => ServerLocation::at(client.clone()).open(terms, for_upkeep),
            Self::Sentinels { sentinels, name, template } => {
                let found = ServerLocation::by_sentinels(sentinels, name, template, &terms.clock, terms.timeout);
                found.open(terms, for_upkeep)
            }
            Self::Cluster(named) => {
                let cluster = Cluster::new(named, terms.clone(), for_upkeep);
                cluster.keep_asking();
                Connections::of_cluster(cluster, terms)
            }
        }
    }
}

/// The location of a server, for one runtime.
pub(super) struct ServerLocation {
    pub(super) place: ServerPlace,
    /// The tasks that track the server's location.
    pub(super) watching: Vec<OwnedTask>,
    /// An open connection to the server; `None` if no connection has been opened yet.
    pub(super) plain: Option<ServerConnection>,
}

impl ServerLocation {
    pub(super) fn at(client: Box<Client>) -> Self {
        Self { place: ServerPlace::At(client), watching: Vec::new(), plain: None }
    }

    pub(super) fn by_sentinels(
        sentinels: &[Client],
        name: &str,
        template: &ConnectionInfo,
        clock: &Arc<dyn Clock>,
        timeout: Duration,
    ) -> Self {
        let sentinels = Arc::new(Sentinels::new(sentinels, name.to_owned(), template.clone(), clock, timeout));
        let watching = sentinels.watch();
        Self { place: ServerPlace::Primary(sentinels), watching, plain: None }
    }

    pub(super) fn open(self, terms: &ExchangeTerms, for_upkeep: bool) -> Connections {
        let place = self.place.clone();
        let connect = |timeout| ServerConnection::ours(place.clone(), Arc::clone(&terms.clock), timeout);
        let node = Node::new(self.plain, connect, terms, for_upkeep);
        Connections::new(Route::One(node, self.watching), Some(PublicationSource::One(self.place)), terms)
    }
}

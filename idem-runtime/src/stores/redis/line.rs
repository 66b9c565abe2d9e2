//! The connections of one runtime to the servers of a store, and the plan by which a runtime opens them.

use std::sync::Arc;
use std::time::Duration;

use redis::{Client, ConnectionInfo};

use super::batch::{Replicas, Terms};
use super::cluster::{Cluster, Named};
use super::connection::{Background, Connection, Place, Theirs};
use super::route::{Node, Route};
use super::sentinel::Sentinels;
use super::wake::{Source, Wakeups};
use crate::clock::Clock;

/// One runtime's connections to a store.
pub(super) struct Line {
    pub(super) route: Route,
    pub(super) wakeups: Wakeups,
}

impl Line {
    fn new(route: Route, wakeups: Wakeups) -> Self {
        Self { route, wakeups }
    }

    pub(super) fn of_cluster(cluster: Arc<Cluster>, terms: &Terms) -> Self {
        let wakeups = Wakeups::new(Source::Cluster(Arc::clone(&cluster))).on(terms.channel.to_string());
        Self::new(Route::Cluster(cluster), wakeups)
    }
}

/// The way in which a runtime connects to the servers.
pub(super) enum Plan {
    /// Over the user's own connection.
    Theirs(Theirs),
    At(Box<Client>),
    /// The primary that these sentinels call `name`. The address in `template` is ignored.
    Sentinels {
        sentinels: Vec<Client>,
        name: String,
        template: Box<ConnectionInfo>,
    },
    Cluster(Arc<Named>),
}

impl Plan {
    /// Opens the connections of the current runtime.
    pub(super) fn line(&self, terms: &Terms, replicas: Option<Replicas>, for_upkeep: bool) -> Line {
        match self {
            Self::Theirs(theirs) => {
                let connect = |timeout| Connection::theirs(theirs.clone(), Arc::clone(&terms.clock), timeout);
                let node = Node::new(None, connect, None, terms, for_upkeep);
                Line::new(Route::One(node, Vec::new()), Wakeups::polling().on(terms.channel.to_string()))
            }
            Self::At(client) => {
                let found = Found { place: Place::At(client.clone()), watching: Vec::new(), plain: None };
                found.line(terms, replicas, for_upkeep)
            }
            Self::Sentinels { sentinels, name, template } => {
                let found = Found::by_sentinels(sentinels, name, template, &terms.clock, terms.timeout);
                found.line(terms, replicas, for_upkeep)
            }
            Self::Cluster(named) => {
                let cluster = Cluster::new(named, terms.clone(), replicas, for_upkeep);
                cluster.keep_asking();
                Line::of_cluster(cluster, terms)
            }
        }
    }
}

/// The location of a server, for one runtime.
pub(super) struct Found {
    pub(super) place: Place,
    /// The tasks that track the server's location.
    pub(super) watching: Vec<Background>,
    /// A connection to the server that is already open.
    pub(super) plain: Option<Connection>,
}

impl Found {
    pub(super) fn by_sentinels(
        sentinels: &[Client],
        name: &str,
        template: &ConnectionInfo,
        clock: &Arc<dyn Clock>,
        timeout: Duration,
    ) -> Self {
        let sentinels = Arc::new(Sentinels::new(sentinels, name.to_owned(), template.clone(), clock, timeout));
        let watching = sentinels.watch();
        Self { place: Place::Primary(sentinels), watching, plain: None }
    }

    pub(super) fn line(self, terms: &Terms, replicas: Option<Replicas>, for_upkeep: bool) -> Line {
        let place = self.place.clone();
        let connect = |timeout| Connection::ours(place.clone(), Arc::clone(&terms.clock), timeout);
        let node = Node::new(self.plain, connect, replicas, terms, for_upkeep);
        let wakeups = Wakeups::new(Source::One(self.place)).on(terms.channel.to_string());
        Line::new(Route::One(node, self.watching), wakeups)
    }
}

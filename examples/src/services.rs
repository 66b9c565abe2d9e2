//! Four services outside of a shop, and the broker of its orders. They count the effects where no worker can reach
//! them.
//!
//! A request is one line on a connection of its own, and the answer is one line. A service does not notice that its
//! caller has been killed: the effect of a request happens although no caller gets the answer.
#![allow(clippy::disallowed_methods, reason = "the services take a moment, as real ones do")]

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// Number of orders that are open while the broker gets new ones.
const OPEN: usize = 20;

/// Effects that one order has had, and what the broker knows about it.
#[derive(Clone, Default, Debug)]
pub struct Effects {
    /// Keys of the charges. The bank recognises a key that it has seen.
    charges: Vec<String>,
    /// Keys of the reservations. The stock recognises a key that it has seen.
    reservations: Vec<String>,
    /// Parcels. The carrier has no keys: each request books a parcel.
    parcels: u32,
    /// Letters. The post office has no keys either.
    letters: u32,
    /// Earliest attempt whose requests for a parcel, and for a letter, are accepted.
    parcels_from: u32,
    letters_from: u32,
    state: OrderState,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum OrderState {
    #[default]
    Open,
    Acknowledged,
    SetAside,
}

impl Effects {
    /// Returns the number of each effect: charges, reservations, parcels, letters.
    pub fn counts(&self) -> [usize; 4] {
        [self.charges.len(), self.reservations.len(), self.parcels as usize, self.letters as usize]
    }
}

/// The services and the broker, in the process that kills the workers.
#[derive(Clone, Default, Debug)]
pub struct Services {
    orders: Arc<Mutex<BTreeMap<u64, Effects>>>,
    closed: Arc<std::sync::atomic::AtomicBool>,
}

impl Services {
    /// Opens the services on a free port, and returns their address.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn open(&self) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let services = self.clone();
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let services = services.clone();
                tokio::spawn(async move { services.serve(connection).await });
            }
        });
        Ok(address)
    }

    /// Takes no further orders.
    pub fn close(&self) {
        self.closed.store(true, std::sync::atomic::Ordering::SeqCst);
    }

    /// Returns the effects of all orders.
    pub fn effects(&self) -> BTreeMap<u64, Effects> {
        self.lock().clone()
    }

    /// Returns the orders whose messages were set aside.
    pub fn set_aside(&self) -> Vec<u64> {
        let orders = self.lock();
        orders.iter().filter(|(_, order)| order.state == OrderState::SetAside).map(|(number, _)| *number).collect()
    }

    /// Delivers a message again that was set aside.
    pub fn deliver_again(&self, order: u64) {
        self.lock().entry(order).or_default().state = OrderState::Open;
    }

    /// Returns whether the post office has sent the letter of an order. From now on it refuses requests of attempts
    /// before `attempt`, so that the answer stays true.
    pub fn has_letter(&self, order: u64, attempt: u32) -> bool {
        let mut orders = self.lock();
        let order = orders.entry(order).or_default();
        order.letters_from = order.letters_from.max(attempt);
        order.letters > 0
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Effects>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(&self, connection: TcpStream) -> io::Result<()> {
        let mut connection = BufReader::new(connection);
        let mut line = String::new();
        connection.read_line(&mut line).await?;
        // A caller that is killed meanwhile leaves a request that still has its effect.
        sleep(Duration::from_millis(line.len() as u64 % 3)).await;
        let answer = self.answer(line.trim());
        sleep(Duration::from_millis(2)).await;
        connection.write_all(format!("{answer}\n").as_bytes()).await
    }

    fn answer(&self, request: &str) -> String {
        let mut words = request.split(' ');
        let service = words.next().unwrap_or_default();
        let number: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or_default();
        let argument = words.next().unwrap_or_default();
        let mut orders = self.lock();
        if service == "orders" {
            let closed = self.closed.load(std::sync::atomic::Ordering::SeqCst);
            let open = orders.values().filter(|order| order.state == OrderState::Open).count();
            let next = orders.len() as u64;
            orders.extend(
                (next..next + if closed { 0 } else { OPEN.saturating_sub(open) as u64 })
                    .map(|new| (new, Effects::default())),
            );
            let open = orders.iter().filter(|(_, order)| order.state == OrderState::Open);
            return open.map(|(number, _)| number.to_string()).collect::<Vec<_>>().join(" ");
        }
        let order = orders.entry(number).or_default();
        let attempt: u32 = argument.parse().unwrap_or_default();
        let once = |keys: &mut Vec<String>| {
            let at = keys.iter().position(|key| key == argument).unwrap_or_else(|| {
                keys.push(argument.to_owned());
                keys.len() - 1
            });
            at + 1
        };
        match service {
            "charge" => format!("charge {number}.{}", once(&mut order.charges)),
            "reserve" => format!("reservation {number}.{}", once(&mut order.reservations)),
            "book" if attempt < order.parcels_from => "refused".to_owned(),
            "book" => {
                order.parcels += 1;
                format!("parcel {number}.{}", order.parcels)
            }
            "parcel" => {
                order.parcels_from = order.parcels_from.max(attempt);
                match order.parcels {
                    0 => "none".to_owned(),
                    parcel => format!("parcel {number}.{parcel}"),
                }
            }
            "letter" if attempt < order.letters_from => "refused".to_owned(),
            "letter" => {
                order.letters += 1;
                format!("letter {number}.{}", order.letters)
            }
            "acknowledge" => {
                order.state = OrderState::Acknowledged;
                "ok".to_owned()
            }
            "aside" => {
                order.state = OrderState::SetAside;
                "ok".to_owned()
            }
            _ => "what?".to_owned(),
        }
    }
}

/// Sends a request to the services at `address`, and returns the answer.
///
/// # Errors
/// If the services do not answer, or refuse the request.
pub async fn ask(address: SocketAddr, request: &str) -> io::Result<String> {
    let mut connection = TcpStream::connect(address).await?;
    connection.write_all(format!("{request}\n").as_bytes()).await?;
    let mut answer = String::new();
    BufReader::new(connection).read_line(&mut answer).await?;
    match answer.trim() {
        "" | "refused" | "what?" => Err(io::Error::other(format!("the services refuse `{request}`"))),
        answer => Ok(answer.to_owned()),
    }
}

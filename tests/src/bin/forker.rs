//! Process that forks with an open SQLite store; `tests/sqlite.rs` starts it.
//!
//! Arguments: the path, and a case. `inherited`: the child uses the store of its parent. `anew`: the child opens its
//! own store. `late`: the child opens a store after the parent has closed the file and a third process, which had the
//! file open, was killed. `busy`: a write is under way at the fork, while another connection holds the lock. Exit
//! status 0 on success.
#![allow(clippy::disallowed_methods)] // Two processes wait for each other.

use std::io::{BufRead, BufReader, Read, Write as _, pipe};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use fork::{Fork, WEXITSTATUS, WIFEXITED, fork, waitpid};
use idem_runtime::StoreExt;
use idem_runtime::store::{Finish, Reservation, Verdict};
use idem_runtime::{SqliteStore, Store, StoreErrorKind};
use idem_tests::calls::{key, request, reserved, stored};

/// Number of keys that each process records.
const KEYS: usize = 20;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

async fn open(path: &Path, busy: bool) -> SqliteStore {
    let options = SqliteStore::options();
    let options = match busy {
        true => options.busy_timeout(Duration::from_secs(600)).response_timeout(Duration::from_millis(100)),
        false => options,
    };
    options.open(path).await.unwrap()
}

async fn record(store: &SqliteStore, name: &str) {
    let lease = reserved(store, name).await;
    let upkeep = store.upkeep();
    idem_runtime::store::renew_all(&*upkeep, std::slice::from_ref(&lease)).await.unwrap();
    assert_eq!(upkeep.finish(&lease, &Finish::Completed(stored(name.to_owned()))).await.unwrap(), Verdict::Applied);
    assert!(store.inspect(&key(name)).await.unwrap().unwrap().record.is_finished());
}

async fn replay(store: &SqliteStore, name: &str) {
    let answer = store.reserve(&request(store, name)).await.unwrap();
    assert!(matches!(answer, Reservation::Finished { .. }), "{answer:?}");
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, how] = &args[..] else { panic!("path, how") };
    let path = Path::new(path);
    let busy = how == "busy";
    let store = block_on(async {
        let store = open(path, busy).await;
        if busy {
            // The reservation gets no answer, because the writer's thread has taken it and waits for the lock.
            let refused = store.reserve(&request(&store, "taken-up")).await.unwrap_err();
            assert_eq!(refused.kind(), StoreErrorKind::Unconfirmed, "{refused}");
        } else {
            record(&store, "before").await;
            // The store opens a fourth connection for a replay without concurrent calls. The child must close this
            // connection too.
            while open_files(path) < 4 {
                replay(&store, "before").await;
            }
        }
        store
    });
    // Parent and child act by turns: each of them waits for a byte from the other process.
    let (mut from_child, mut to_parent) = pipe().unwrap();
    let (mut from_parent, mut to_child) = pipe().unwrap();
    match fork().unwrap() {
        Fork::Child => {
            // A child must not drop the inherited store.
            let store = std::mem::ManuallyDrop::new(store);
            block_on(async {
                if how == "late" {
                    from_parent.read_exact(&mut [0]).unwrap();
                    assert!((*store).inspect(&key("before")).await.unwrap().unwrap().record.is_finished());
                    return;
                }
                // Store of the child: the inherited one or a new one. If a write was under way at the fork, all
                // operations are refused.
                let own = match &**how {
                    "inherited" => (*store).clone(),
                    "anew" => open(path, busy).await,
                    _ => {
                        for refused in [
                            store.reserve(&request(&*store, "k")).await.unwrap_err(),
                            store.upkeep().inspect(&key("k")).await.unwrap_err(),
                            SqliteStore::open(path).await.unwrap_err(),
                        ] {
                            assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{refused}");
                            assert!(refused.to_string().contains("forked"), "{refused}");
                        }
                        std::process::exit(0);
                    }
                };
                assert!(own.inspect(&key("before")).await.unwrap().unwrap().record.is_finished());
                for _ in 0..KEYS {
                    replay(&own, "before").await;
                }
                for n in 0..KEYS {
                    record(&own, &format!("child-{n}")).await;
                }
                to_parent.write_all(b"x").unwrap();
                from_parent.read_exact(&mut [0]).unwrap();
                // The parent has closed its store. If the child's locks had no effect, SQLite would take the parent for
                // the last user of the file.
                for n in KEYS..2 * KEYS {
                    record(&own, &format!("child-{n}")).await;
                }
            });
            std::process::exit(0);
        }
        Fork::Parent(child) => {
            drop((to_parent, from_parent));
            block_on(async {
                if how != "busy" && how != "late" {
                    for n in 0..KEYS {
                        record(&store, &format!("parent-{n}")).await;
                    }
                    from_child.read_exact(&mut [0]).unwrap();
                    store.flush().await;
                }
            });
            drop(store);
            if !busy {
                // The file has no open descriptor once all connections are closed.
                while open_files(path) > 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if how == "late" {
                    killed_process(path);
                }
                to_child.write_all(b"x").unwrap();
            }
            let status = waitpid(child).unwrap();
            assert!(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child failed: {status}");
        }
    }
}

/// Records into the file at `path`, in a process that is killed while it has the file open.
fn killed_process(path: &Path) {
    let recorder = std::env::current_exe().unwrap().with_file_name("recorder");
    let mut command = Command::new(recorder);
    command.args([&format!("sqlite {}", path.display()), "100000"]).stdout(Stdio::piped());
    let mut recorder = command.spawn().unwrap();
    let mut lines = BufReader::new(recorder.stdout.take().unwrap()).lines();
    assert_eq!(lines.nth(9).unwrap().unwrap(), "9");
    recorder.kill().unwrap();
    recorder.wait().unwrap();
}

/// Number of descriptors of this process that refer to the file at `path` or its companions.
fn open_files(path: &Path) -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    files.filter(|file| std::fs::read_link(file.as_ref().unwrap().path()).is_ok_and(|file| file == path)).count()
}

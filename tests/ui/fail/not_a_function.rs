use idem_runtime::idempotent;

#[idempotent(key = "{self.id}", ttl = "7d", store = self.store)]
struct Handler {
    id: u32,
}

fn main() {
    drop(Handler { id: 1 }.id);
}

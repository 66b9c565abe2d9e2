//! Computes the cluster slot of a key.

use super::super::command::Name;

/// Number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// Returns the slot of a key.
pub(in super::super) fn slot_of(name: Name<'_>) -> u16 {
    let mut key = Vec::with_capacity(256);
    name.write(&mut key);
    slot(&key)
}

/// Returns the slot of a key. If braces enclose a part of the key, only the part between the first `{` and the next `}`
/// is hashed, unless that part is empty. Users choose the keys, so a key may contain braces.
fn slot(key: &[u8]) -> u16 {
    let position = |bytes: &[u8], wanted: u8| bytes.iter().position(|byte| *byte == wanted);
    let tag = position(key, b'{').and_then(|open| {
        let rest = &key[open + 1..];
        position(rest, b'}').filter(|length| *length > 0).map(|length| &rest[..length])
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

/// Computes CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    const fn entry(high: u16) -> u16 {
        let (mut crc, mut bit) = (high << 8, 0);
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        crc
    }
    const TABLE: [u16; 256] = {
        let (mut table, mut high) = ([0; 256], 0);
        while high < 256 {
            #[expect(clippy::cast_possible_truncation, reason = "below 256")]
            {
                table[high] = entry(high as u16);
            }
            high += 1;
        }
        table
    };
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) ^ u16::from(*byte))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_keys_equal_the_answers_of_a_redis_server() {
        // `CLUSTER KEYSLOT` hashes only the second text of each pair. 0x31c3 is the check value of CRC-16/XMODEM.
        assert_eq!(crc16(b"123456789"), 0x31c3);
        for (key, of) in [
            ("{user1000}.following", "user1000"),
            ("foo{bar}{zap}", "bar"),
            ("foo{{bar}}zap", "{bar"),
            ("foo{}{bar}", "foo{}{bar}"),
            ("}a{b}", "b"),
            ("a{b", "a{b"),
        ] {
            assert_eq!(slot(key.as_bytes()), crc16(of.as_bytes()) % SLOTS, "{key}");
        }
        assert_eq!(slot(b"idem:1/test/k"), crc16(b"idem:1/test/k") % SLOTS);
    }
}

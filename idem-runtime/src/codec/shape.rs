//! Hash of the shape of a value: the kinds of its parts and the names of its types, fields and variants, in the order
//! in which they are written.
//!
//! Writer and reader hash the same steps: the writer hashes the calls of `Serialize`, the reader the requests of
//! `Deserialize`. If another type wrote the bytes, only this hash reveals the difference, because the bytes contain no
//! names.

use std::cell::Cell;

/// A step that enters the hash. Records contain hashes of these numbers, so the numbers must not change.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(super) enum ShapeStep {
    Bool = 1,
    I8 = 2,
    I16 = 3,
    I32 = 4,
    I64 = 5,
    I128 = 6,
    U8 = 7,
    U16 = 8,
    U32 = 9,
    U64 = 10,
    U128 = 11,
    F32 = 12,
    F64 = 13,
    Char = 14,
    Str = 15,
    Bytes = 16,
    None = 17,
    Some = 18,
    Unit = 19,
    UnitStruct = 20,
    NewtypeStruct = 21,
    Seq = 22,
    Tuple = 23,
    TupleStruct = 24,
    Map = 25,
    Struct = 26,
    Enum = 27,
    UnitVariant = 28,
    NewtypeVariant = 29,
    TupleVariant = 30,
    StructVariant = 31,
    /// End of a value that has parts.
    End = 32,
}

/// Hash of a shape: FNV-1a with 64 bits (draft-eastlake-fnv). A weak hash suffices, because no attacker chooses types
/// that collide.
pub(super) struct Shape(Cell<u64>);

impl Shape {
    #[cfg(feature = "postcard")]
    pub(super) const BYTES: usize = 8;

    #[cfg(feature = "postcard")]
    pub(super) const fn new() -> Self {
        Self(Cell::new(0xcbf2_9ce4_8422_2325))
    }

    fn byte(&self, byte: u8) {
        self.0.set((self.0.get() ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    }

    pub(super) fn kind(&self, kind: ShapeStep) {
        self.byte(kind as u8);
    }

    pub(super) fn name(&self, name: &str) {
        name.bytes().for_each(|byte| self.byte(byte));
        // The byte 0xff separates two names, because it does not occur in UTF-8.
        self.byte(0xff);
    }

    pub(super) fn len(&self, len: usize) {
        (len as u64).to_le_bytes().into_iter().for_each(|byte| self.byte(byte));
    }

    #[cfg(feature = "postcard")]
    pub(super) fn finish(&self) -> [u8; Self::BYTES] {
        self.0.get().to_le_bytes()
    }
}

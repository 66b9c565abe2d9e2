//! Parameters whose values no log shows ([`HiddenParam`]), the parameters of statements about leases, for
//! example their keys.

use std::fmt;

use bytes::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type};

use crate::record::Lease;

/// A parameter of a statement. The driver logs parameters, so this type hides its value.
pub(super) struct HiddenParam<T>(pub(super) T);

impl<T> fmt::Debug for HiddenParam<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl<T: ToSql> ToSql for HiddenParam<T> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        self.0.to_sql(ty, out)
    }

    fn accepts(ty: &Type) -> bool {
        T::accepts(ty)
    }

    tokio_postgres::types::to_sql_checked!();
}

/// The parameters that name the attempts of a statement about many leases: their keys, owner tokens and numbers.
pub(super) struct LeaseParams<'a> {
    pub(super) keys: Vec<&'a str>,
    pub(super) owners: HiddenParam<Vec<&'a [u8]>>,
    pub(super) attempts: Vec<i64>,
}

impl<'a> LeaseParams<'a> {
    pub(super) fn new(leases: impl Iterator<Item = &'a Lease> + Clone) -> Self {
        Self {
            keys: leases.clone().map(|lease| lease.key.as_str()).collect(),
            owners: HiddenParam(leases.clone().map(|lease| &lease.owner.as_bytes()[..]).collect()),
            attempts: leases.map(|lease| lease.attempt.into()).collect(),
        }
    }
}

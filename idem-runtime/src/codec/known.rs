//! Reading of results that any codec of the library wrote.

use serde::de::DeserializeOwned;

#[cfg(feature = "msgpack")]
use super::msgpack;
#[cfg(feature = "postcard")]
use super::postcard;
use super::{Codec, CodecError, CodecName, Json, bytes};

/// Decodes a result that the library's codec `name` wrote. Returns `None` if the library has no such codec, or if this
/// build does not include it.
pub(super) fn decode<V: DeserializeOwned>(name: CodecName, recorded: &[u8]) -> Option<Result<V, CodecError>> {
    if name == CodecName::of::<Json>() {
        return Some(Json::decode(recorded));
    }
    if name == bytes::NAME {
        return Some(bytes::decode(recorded));
    }
    #[cfg(feature = "msgpack")]
    if name == CodecName::of::<msgpack::MessagePack>() {
        return Some(msgpack::MessagePack::decode(recorded));
    }
    #[cfg(feature = "postcard")]
    if name == CodecName::of::<postcard::Postcard>() {
        return Some(postcard::Postcard::decode(recorded));
    }
    None
}

/// Returns the feature that this build lacks and needs to read results of the codec `name`.
pub(super) fn missing_feature(name: &str) -> Option<&'static str> {
    match name {
        "msgpack" if !cfg!(feature = "msgpack") => Some("msgpack"),
        "postcard" if !cfg!(feature = "postcard") => Some("postcard"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::ResultProblem;

    #[test]
    fn the_error_for_a_result_names_the_feature_that_its_codec_needs() {
        for (name, is_there) in [("msgpack", cfg!(feature = "msgpack")), ("postcard", cfg!(feature = "postcard"))] {
            let codec = CodecName::new(name.as_bytes()).unwrap();
            assert_eq!(decode::<u8>(codec, &[7]).is_some(), is_there);
            let said = ResultProblem::OtherCodec { codec: name.to_owned() }.to_string();
            assert_eq!(said.contains(&format!("enable the feature `{name}`")), !is_there, "{said}");
        }
        assert_eq!(decode::<u8>(CodecName::of::<Json>(), b"7").map(Result::unwrap), Some(7));
        assert_eq!(decode::<Vec<u8>>(bytes::NAME, b"7").map(Result::unwrap), Some(vec![b'7']));
        assert!(decode::<u8>(CodecName::new(b"jso").unwrap(), b"7").is_none());
    }
}

//! The `Idempotency-Key` layer over real sockets, HTTP/1.1 and HTTP/2.
//!
//! Mistakes of other libraries' layers for this header, each with the tests that show the right behaviour of this
//! layer:
//!
//! | mistake | test |
//! |---|---|
//! | `Cache-Control: no-store` frees the key | `a_response_is_recorded_whatever_its_cache_control` |
//! | a response over the limit, or a stream, runs again | `a_handler_whose_response_is_too_large_to_record_never_runs_again`, `a_stream_of_events_reaches_the_first_client_as_it_comes` |
//! | keys of nested routers lack the prefix of the router | `routes_of_different_nested_routers_are_different_operations` |
//! | a refreshed token of the same caller makes another key | `a_refreshed_token_is_the_same_caller` |
//! | anonymous clients share their keys | `a_request_without_credentials_is_neither_recorded_nor_replayed` |
//! | a key is accepted again with another request | `a_key_is_bound_to_its_path_query_headers_and_body` |
//! | while the first request runs, a different request with its key gets an answer that asks for a retry | `a_different_request_is_a_mismatch_while_the_first_runs` |
//! | a client that hangs up cancels the handler | `a_client_that_hangs_up_cancels_no_handler_that_has_begun` |
//! | the values of headers are split at commas | `a_replay_has_the_same_headers_in_their_order` |
//! | `Location` and `ETag` get lost, 201 becomes 200 | `a_replay_has_the_same_headers_in_their_order` |
//! | cookies and challenges are replayed | `headers_that_concern_only_the_first_exchange_are_not_replayed` |
//! | some ends of a handler leave the key locked | `handlers_that_panic_or_break_off_their_response_free_the_key` |
//! | a cancelled run is recorded as a final 500 | `a_client_that_hangs_up_while_its_key_is_reserved_leaves_the_key_free`, `a_client_that_hangs_up_cancels_no_handler_that_has_begun` |
//! | the fingerprint covers the parsed body instead of its bytes | `request_bodies_are_compared_byte_by_byte` |
//! | an equal payload under another key is refused | `equal_payloads_under_two_keys_are_two_operations` |
//! | the record is written after the response | `the_response_is_recorded_before_it_is_sent` |
//! | an empty key counts as a missing key, or has no error of its own | `an_invalid_key_is_refused` |
//! | the keys of a route are forgotten when a path parameter gets another name | `a_path_parameter_can_get_another_name_without_losing_keys` |
//! | tenants on two hosts share their keys, or a request of HTTP/2 has no host | `each_host_can_have_its_own_keys`, `a_host_in_the_payload_is_the_same_in_http_1_and_http_2` |
//! | a deeply nested body ends the process | `a_deeply_nested_request_body_is_refused_and_leaves_no_record` |
//! | a streamed body holds its slot for ever | `a_streamed_request_body_has_a_deadline` |
//! | a client without gRPC gets status 200 for each refusal | `only_a_client_of_grpc_gets_refusals_as_a_status_of_grpc` |
//! | the fingerprint of a request that loses a race is not compared | `of_many_concurrent_duplicates_one_runs`, `a_different_request_is_a_mismatch_while_the_first_runs` |
#![allow(clippy::disallowed_methods)] // Servers and clients wait on real time.

#[path = "http/clients.rs"]
mod clients;
#[path = "http/contracts.rs"]
mod contracts;
#[path = "http/grpc.rs"]
mod grpc;
#[path = "http/idemkit.rs"]
mod idemkit;
#[path = "http/idempot.rs"]
mod idempot;
#[path = "http/json.rs"]
mod json;
#[path = "http/keys.rs"]
mod keys;
#[path = "http/limits.rs"]
mod limits;
#[path = "http/profiles.rs"]
mod profiles;
#[path = "http/reconciler.rs"]
mod reconciler;
#[path = "http/records.rs"]
mod records;
#[path = "http/retries.rs"]
mod retries;
#[path = "http/rig.rs"]
mod rig;
#[path = "http/routers.rs"]
mod routers;
#[path = "http/scenarios.rs"]
mod scenarios;
#[path = "http/stacks.rs"]
mod stacks;
#[path = "http/statuses.rs"]
mod statuses;
#[path = "http/stores.rs"]
mod stores;
#[path = "http/structured_fields.rs"]
mod structured_fields;
#[path = "http/ucp.rs"]
mod ucp;

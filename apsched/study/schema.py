"""The tables of ``study.sqlite``; :mod:`apsched.study.store` describes them."""

FORMAT = 1
SCHEMA = """
create table if not exists study (format integer not null);
create table if not exists runs (
    run_id text primary key, command text not null, versions text not null,
    began_utc text not null, ended_utc text, points integer
);
create table if not exists graphs (
    graph_id text primary key, name text not null, graph_hash text not null,
    cluster text not null, described text not null, num_nodes integer not null,
    num_collectives integer not null, device_memory_bytes integer, notes text not null,
    file text not null
);
create table if not exists captures (capture_id text primary key, graph_ids text not null);
create table if not exists step_ranges (
    range_id text primary key, floor_bytes integer not null, peak_bytes integer not null
);
create table if not exists points (
    point_id text primary key, graph_id text not null references graphs,
    memory_cap text not null, described text not null, run_id text not null
);
create table if not exists results (
    point_id text primary key references points, status text not null, how text not null,
    memory_cap_bytes integer, step_ticks integer, bound_ticks integer not null,
    bound_source text not null, peak_memory_bytes integer, num_launches integer,
    floor_memory_bytes integer not null, floor_bound_bytes integer not null,
    solved_floor_bytes integer not null, solved_peak_bytes integer, seconds real not null,
    report text not null, schedule text
);
create view if not exists answers as
    select graphs.name as graph, graphs.cluster, points.*,
           results.step_ticks / 1000.0 as step_time_us, results.bound_ticks / 1000.0 as bound_us,
           results.status, results.how, results.memory_cap_bytes, results.peak_memory_bytes,
           results.num_launches, results.floor_memory_bytes, results.seconds, results.schedule
    from points join graphs using (graph_id) join results using (point_id);
"""

// The table of a switch (switch/protocol/switch.py) for a programmable switch: P4-16, architecture v1model.
//
//     up:    gradients are added, exponents are combined by their maximum; the sum goes to the parent
//     down:  parameters, maxima and the parent's heartbeats go to all children (multicast)
//     else:  children's heartbeats go to the control port, where software merges them
//
// p4_entries.py makes the entries of the control plane. Slots are registers, each of which is read and written
// at most once per packet. A job has a range of slots, whose length is a power of two.
//
// Limits of real switches, and how this program deals with them (docs/decisions/0037-the-table-in-p4.md):
// - A switch cannot hash a packet. So the tag is not checked: the sender is identified by its ingress port,
//   and a sum leaves with tag 0. A front-end at the edge must check the tags and seal the sums.
// - A switch cannot hold 1408 bytes of a packet in one pass. So PAYLOAD_BITS is 2048 by default: 256 bytes
//   per packet. A software target processes whole packets with -DPAYLOAD_BITS=11264.
// - In this program, one register and one expression process the whole payload: several elements at once,
//   without carries between elements. An ASIC does the same with 64 parallel stateful units of 32 bits.
#include <core.p4>
#include <v1model.p4>

#ifndef PAYLOAD_BITS
#define PAYLOAD_BITS 2048
#endif
#ifndef SLOTS
#define SLOTS 4096
#endif
#define JOBS 64
#define CONTROL_PORT 255

typedef bit<PAYLOAD_BITS> payload_t;

const bit<16> IPV4 = 0x0800;
const bit<8> UDP = 17;
const bit<16> MAGIC = 0x5452;   // little endian: 0x5254
const bit<8> VERSION = 1;
const bit<8> GRADIENT = 1;
const bit<8> EXPONENTS = 2;
const bit<8> PARAMETERS = 3;
const bit<8> MAXIMA = 4;
const bit<8> GRADIENT_BEAT = 6;

// EACH_n: 1 in each element of n bits. HIGH_n: the highest bit of each element of n bits.
const payload_t ALL = ~(payload_t)0;
const payload_t EACH_8 = ALL / 255;
const payload_t EACH_16 = ALL / 65535;
const payload_t EACH_32 = ALL / 4294967295;
const payload_t HIGH_8 = EACH_8 << 7;
const payload_t HIGH_16 = EACH_16 << 15;
const payload_t HIGH_32 = EACH_32 << 31;
const payload_t LOW_BYTES = EACH_16 * 255;
const payload_t LOW_HALVES = EACH_32 * 65535;

header ethernet_t {
    bit<48> destination;
    bit<48> source;
    bit<16> kind;
}

header ipv4_t {
    bit<8> version_ihl;
    bit<8> service;
    bit<16> nbytes;
    bit<16> id;
    bit<16> fragment;
    bit<8> ttl;
    bit<8> protocol;
    bit<16> checksum;
    bit<32> source;
    bit<32> destination;
}

header udp_t {
    bit<16> source;
    bit<16> destination;
    bit<16> nbytes;
    bit<16> checksum;
}

// switch/packets.py HEADER. Its numbers are little endian, and are byte-swapped before they are compared.
header head_t {
    bit<16> magic;
    bit<8> version;
    bit<8> kind;
    bit<32> job;
    bit<64> number;
    bit<16> sender;
    bit<8> width;
    bit<8> flags;
    bit<32> a;
    bit<32> b;
    bit<32> c;
    bit<64> credit;
    bit<64> tag;
}

header payload_h {
    payload_t data;
}

struct headers_t {
    ethernet_t ethernet;
    ipv4_t ipv4;
    udp_t udp;
    head_t head;
    payload_h payload;
}

// The parameters of the packet's job, set by the control plane.
struct job_t {
    bit<32> place;       // index of the job in the switch
    bit<32> base;        // the job's first slot
    bit<64> mask;        // the number of the job's slots (a power of two) minus one
    bit<64> all_bits;    // a bit for each child
    bit<16> child;       // this switch's number at its parent
    bit<9> port;         // port of the parent
    bit<16> group;       // multicast group of the children
    bit<48> parent_mac;
    bit<48> own_mac;
    bit<32> parent_host;
    bit<16> parent_udp;
}

struct metadata_t {
    job_t job;
    bit<64> number;      // the packet's number, byte-swapped
    bit<64> who;         // the sender's bit
}

parser SwitchParser(packet_in packet, out headers_t hdr, inout metadata_t meta,
                    inout standard_metadata_t standard) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.kind) {
            IPV4: parse_ipv4;
            default: accept;
        }
    }
    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        // no options; not fragmented (the "don't fragment" flag may be set)
        transition select(hdr.ipv4.version_ihl, hdr.ipv4.protocol, hdr.ipv4.fragment & 0x3fff) {
            (0x45, UDP, 0): parse_udp;
            default: accept;
        }
    }
    state parse_udp {
        packet.extract(hdr.udp);
        transition parse_head;
    }
    state parse_head {
        packet.extract(hdr.head);
        transition select(hdr.head.magic, hdr.head.version, hdr.head.kind, hdr.udp.nbytes) {
            (MAGIC, VERSION, GRADIENT, 56 + PAYLOAD_BITS / 8): parse_payload;
            (MAGIC, VERSION, EXPONENTS, 56 + PAYLOAD_BITS / 8): parse_payload;
            default: accept;
        }
    }
    state parse_payload {
        packet.extract(hdr.payload);
        transition accept;
    }
}

control VerifyNothing(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

// Converts elements of `width` bytes from little to big endian, or back.
control Turn(inout payload_t x, in bit<8> width) {
    apply {
        if (width == 2 || width == 4) {
            x = ((x & LOW_BYTES) << 8) | ((x >> 8) & LOW_BYTES);
        }
        if (width == 4) {
            x = ((x & LOW_HALVES) << 16) | ((x >> 16) & LOW_HALVES);
        }
    }
}

// total = total + with, modulo the element size; `high` is the highest bit of each element.
control Add(inout payload_t total, in payload_t with, in payload_t high) {
    apply {
        total = ((total & ~high) + (with & ~high)) ^ ((total ^ with) & high);
    }
}

// total = the maximum of each pair of bytes
control Greatest(inout payload_t total, in payload_t with) {
    payload_t chosen;
    apply {
        chosen = (total | HIGH_8) - (with & ~HIGH_8);
        chosen = ((total & ~with) | (~(total ^ with) & chosen)) & HIGH_8;
        chosen = (chosen >> 7) * 255;
        total = (total & chosen) | (with & ~chosen);
    }
}

control Ingress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    register<bit<64>>(SLOTS) numbers;
    register<bit<64>>(SLOTS) came;      // a bit for each child in the sum; 0 in an unused slot
    register<bit<16>>(SLOTS) forms;     // kind and width of the sum
    register<payload_t>(SLOTS) sums;    // big endian
    register<bit<64>>(JOBS) acked;      // the parent has all numbers below this one
    counter(JOBS * 8, CounterType.packets) outcomes;   // packets of each job, by outcome
    const bit<32> ADDED = 0;
    const bit<32> COMPLETED = 1;
    const bit<32> DROPPED_OLD = 2;
    const bit<32> REPEATED = 3;
    const bit<32> ANSWERED = 4;
    const bit<32> MISMATCHED = 5;

    Turn() turn_in;
    Turn() turn_out;
    Add() add;
    Greatest() greatest;

    bit<32> slot;
    bit<64> number;
    bit<64> bits;
    bit<64> ack;
    bit<16> form;
    bit<16> own_form;
    payload_t total;
    bit<32> outcome;

    action this_job(bit<32> place, bit<32> base, bit<64> mask, bit<64> all_bits, bit<16> child,
                    bit<9> port, bit<16> group, bit<48> parent_mac, bit<48> own_mac,
                    bit<32> parent_host, bit<16> parent_udp) {
        meta.job.place = place;
        meta.job.base = base;
        meta.job.mask = mask;
        meta.job.all_bits = all_bits;
        meta.job.child = child;
        meta.job.port = port;
        meta.job.group = group;
        meta.job.parent_mac = parent_mac;
        meta.job.own_mac = own_mac;
        meta.job.parent_host = parent_host;
        meta.job.parent_udp = parent_udp;
    }

    table jobs {
        key = {
            hdr.ipv4.destination: exact;
            hdr.udp.destination: exact;
            hdr.head.job: exact;
        }
        actions = { this_job; NoAction; }
        default_action = NoAction();
        size = JOBS;
    }

    action this_child(bit<64> who) {
        meta.who = who;
    }

    table children {
        key = {
            meta.job.place: exact;
            hdr.head.sender: exact;
            standard.ingress_port: exact;
        }
        actions = { this_child; NoAction; }
        default_action = NoAction();
        size = JOBS * 64;
    }

    action to_port(bit<9> port) {
        standard.egress_spec = port;
    }

    action drop() {
        mark_to_drop(standard);
    }

    // Packets that belong to no job.
    table forward {
        key = { hdr.ethernet.destination: exact; }
        actions = { to_port; drop; }
        default_action = drop();
    }

    action to_parent() {
        hdr.ethernet.destination = meta.job.parent_mac;
        hdr.ethernet.source = meta.job.own_mac;
        hdr.ipv4.source = hdr.ipv4.destination;
        hdr.ipv4.destination = meta.job.parent_host;
        hdr.ipv4.ttl = 64;
        hdr.udp.source = hdr.udp.destination;
        hdr.udp.destination = meta.job.parent_udp;
        hdr.udp.checksum = 0;
        hdr.head.sender = meta.job.child[7:0] ++ meta.job.child[15:8];
        hdr.head.tag = 0;
        standard.egress_spec = meta.job.port;
    }

    action to_children() {
        standard.mcast_grp = meta.job.group;
    }

    action turn_number() {
        meta.number = hdr.head.number[7:0] ++ hdr.head.number[15:8] ++ hdr.head.number[23:16]
            ++ hdr.head.number[31:24] ++ hdr.head.number[39:32] ++ hdr.head.number[47:40]
            ++ hdr.head.number[55:48] ++ hdr.head.number[63:56];
    }

    apply {
        if (!hdr.ethernet.isValid()) {
            drop();
        } else if (!hdr.head.isValid() || hdr.head.magic != MAGIC || hdr.head.version != VERSION) {
            forward.apply();
        } else if (!jobs.apply().hit) {
            forward.apply();
        } else if (hdr.payload.isValid()) {
            turn_number();
            if (!children.apply().hit) {
                drop();
            } else {
                @atomic {
                    slot = meta.job.base + (bit<32>)(meta.number & meta.job.mask);
                    numbers.read(number, slot);
                    came.read(bits, slot);
                    forms.read(form, slot);
                    sums.read(total, slot);
                    acked.read(ack, meta.job.place);
                    own_form = hdr.head.kind ++ hdr.head.width;
                    if (meta.number < ack || (bits != 0 && meta.number < number)) {
                        outcome = DROPPED_OLD;
                    } else {
                        if (meta.number > number || bits == 0) {
                            bits = 0;
                            form = own_form;
                        }
                        if (form != own_form) {
                            outcome = MISMATCHED;
                        } else if (bits == meta.job.all_bits) {
                            outcome = ANSWERED;
                        } else if ((bits & meta.who) != 0) {
                            outcome = REPEATED;
                        } else {
                            turn_in.apply(hdr.payload.data, hdr.head.width);
                            if (bits == 0) {
                                total = hdr.payload.data;
                            } else if (hdr.head.kind == EXPONENTS) {
                                greatest.apply(total, hdr.payload.data);
                            } else if (hdr.head.width == 4) {
                                add.apply(total, hdr.payload.data, HIGH_32);
                            } else if (hdr.head.width == 2) {
                                add.apply(total, hdr.payload.data, HIGH_16);
                            } else {
                                add.apply(total, hdr.payload.data, HIGH_8);
                            }
                            bits = bits | meta.who;
                            numbers.write(slot, meta.number);
                            came.write(slot, bits);
                            forms.write(slot, form);
                            sums.write(slot, total);
                            outcome = ADDED;
                            if (bits == meta.job.all_bits) {
                                outcome = COMPLETED;
                            }
                        }
                    }
                }
                outcomes.count((meta.job.place << 3) + outcome);
                if (outcome == COMPLETED || outcome == ANSWERED) {
                    turn_out.apply(total, hdr.head.width);
                    hdr.payload.data = total;
                    to_parent();
                } else {
                    drop();
                }
            }
        } else if (standard.ingress_port == meta.job.port && hdr.head.kind == GRADIENT_BEAT) {
            turn_number();
            @atomic {
                acked.read(ack, meta.job.place);
                if (meta.number > ack) {
                    acked.write(meta.job.place, meta.number);
                }
            }
            to_children();
        } else if (standard.ingress_port == meta.job.port
                   && (hdr.head.kind == PARAMETERS || hdr.head.kind == MAXIMA)) {
            to_children();
        } else {
            to_port(CONTROL_PORT);
        }
    }
}

control Egress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    action to_child(bit<48> own_mac, bit<48> mac, bit<32> host, bit<16> udp) {
        hdr.ethernet.source = own_mac;
        hdr.ethernet.destination = mac;
        hdr.ipv4.source = hdr.ipv4.destination;
        hdr.ipv4.destination = host;
        hdr.ipv4.ttl = 64;
        hdr.udp.source = hdr.udp.destination;
        hdr.udp.destination = udp;
        hdr.udp.checksum = 0;
    }

    table copies {
        key = { standard.egress_rid: exact; }
        actions = { to_child; NoAction; }
        default_action = NoAction();
        size = JOBS * 64;
    }

    apply {
        if (standard.egress_rid != 0) {
            copies.apply();
        }
    }
}

control Checksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid(),
            { hdr.ipv4.version_ihl, hdr.ipv4.service, hdr.ipv4.nbytes, hdr.ipv4.id,
              hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.source,
              hdr.ipv4.destination },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control SwitchDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.head);
        packet.emit(hdr.payload);
    }
}

V1Switch(SwitchParser(), VerifyNothing(), Ingress(), Egress(), Checksum(), SwitchDeparser()) main;

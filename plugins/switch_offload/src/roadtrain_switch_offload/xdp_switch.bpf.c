// The table of a switch (switch/protocol/switch.py) in the kernel. Packets of gradients and of exponents are
// summed when they arrive, before the kernel allocates a buffer for them. The sum leaves through the device
// on which the last packet arrived.
//
// The program takes a packet if it is UDP over IPv4 to a job's port, has the length of a bulk packet, and
// has a correct tag (switch/packets.py). All other packets go to user space: heartbeats, parameters, foreign
// packets, fragments, several packets joined by the kernel's segmentation offload, other address families.
// If user space finds gradients among these packets, it passes them to the program `add_packet`, which works
// on the same table, so a number is never in two tables.
//
// An entry is protected by a spin lock while its payload is read and written, because packets of different
// children arrive on different CPUs. Loops have fixed bounds, and all memory belongs to the maps. Assumes
// little endian and unaligned loads. User space resolves the parent's address and writes it into `live`.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;

#define MAGIC 0x5254
#define VERSION 1
#define GRADIENT 1
#define EXPONENTS 2
#define MOST_JOBS 64
#define PAYLOAD_WORDS 176                  // of 64 bits
#define TAG_WORD 5                         // in a header, which has six words
#define COVERED (TAG_WORD + PAYLOAD_WORDS) // words covered by the tag
#define MOST_NUMBER ((1ULL << 62) - 1)     // maximum of a session's numbers
#define DONT_FRAGMENT 0x4000
#define FRAGMENT 0x3fff // the packet is a fragment: more fragments follow, or it is not the first fragment

struct header {
	u16 magic;
	u8 version;
	u8 kind;
	u32 job;
	u64 number;
	u16 sender;
	u8 width;
	u8 flags;
	u32 a;
	u32 b;
	u32 c;
	u64 credit;
	u64 tag;
};

struct packet {
	struct header head;
	u64 payload[PAYLOAD_WORDS];
};

// Parameters of a job, which user space writes once. The fields are those of JOB in xdp_table.py.
struct job {
	u32 job;
	u32 slots;
	u32 live;         // index in the map `live`
	u16 children;
	u16 child;        // this switch's number at its parent
	u32 parent_host;  // big endian, like everything that is copied into headers
	u16 parent_port;  // big endian
	u16 first;        // number of child 0 in packets
	u64 sip[2];
	u64 words[COVERED + 1]; // NH's first key: all words but the last; its second key: all but the first
};

// Values that change while a job runs. The fields are those of LIVE in xdp_table.py. Mapped by user space.
struct live {
	u64 acked; // the parent has all numbers below this one
	u64 now;   // ticks of user space's clock
	// Packets by outcome, as switch/switch_table.py counts them.
	u64 added;       // added to a sum that is not complete yet
	u64 completed;   // the last packet of a sum
	u64 dropped_old; // the number was acknowledged, or its slot has a greater one
	u64 repeated;    // the child's packet was already in the sum
	u64 answered;    // the sum was already complete and is sent again
	u64 mismatched;  // the kind or width differs from the slot's, or the packet cannot be summed
	u64 handed_up;   // sums left for user space to send, because `found` is 0
	u32 found;       // whether the two addresses below are valid
	u8 parent[ETH_ALEN]; // the next hop towards the parent
	u8 own[ETH_ALEN];
};

struct entry {
	struct bpf_spin_lock lock;
	u8 done; // all children's packets are in the sum
	u8 kind;
	u8 width;
	u8 unused;
	u64 number;
	u64 came;  // bit i is set if the packet of child i is in the sum; all bits are 0 in an unused slot
	u64 began; // value of `now` when the first packet arrived
	u64 payload[PAYLOAD_WORDS];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MOST_JOBS);
	__type(key, u32); // the UDP port
	__type(value, struct job);
} jobs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MOST_JOBS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct live);
} live SEC(".maps");

// A template: user space makes the table of each job like this map.
struct table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_INNER_MAP); // tables may differ in size
	__type(key, u32); // the slot
	__type(value, struct entry);
} table_pattern SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, MOST_JOBS);
	__type(key, u32); // the UDP port
	__array(values, struct table);
} tables SEC(".maps");

// --- the tag ---

static __always_inline u64 rotated(u64 x, u32 by)
{
	return x << by | x >> (64 - by);
}

static __always_inline void sip_round(u64 *v)
{
	v[0] += v[1];
	v[1] = rotated(v[1], 13) ^ v[0];
	v[0] = rotated(v[0], 32);
	v[2] += v[3];
	v[3] = rotated(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotated(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotated(v[1], 17) ^ v[2];
	v[2] = rotated(v[2], 32);
}

static __always_inline void sip_word(u64 *v, u64 word)
{
	v[3] ^= word;
	sip_round(v);
	sip_round(v);
	v[0] ^= word;
}

static __always_inline u64 siphash(const u64 *key, u64 first, u64 second, u64 third)
{
	u64 v[4] = {key[0] ^ 0x736f6d6570736575ULL, key[1] ^ 0x646f72616e646f6dULL,
		    key[0] ^ 0x6c7967656e657261ULL, key[1] ^ 0x7465646279746573ULL};

	sip_word(v, first);
	sip_word(v, second);
	sip_word(v, third);
	sip_word(v, 24ULL << 56); // length of the message in bytes
	v[2] ^= 0xff;
	sip_round(v);
	sip_round(v);
	sip_round(v);
	sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static __always_inline u64 product(u64 word, u64 key)
{
	u64 low = (u32)(word + key);
	u64 high = (u32)((word >> 32) + (key >> 32));

	return low * high;
}

static __always_inline u64 tag_of(const struct packet *packet, const struct job *job)
{
	const u64 *head = (const u64 *)&packet->head;
	u64 first = 0, second = 0;

	for (int i = 0; i < TAG_WORD; i++) {
		first += product(head[i], job->words[i]);
		second += product(head[i], job->words[i + 1]);
	}
#pragma clang loop unroll_count(8)
	for (int i = 0; i < PAYLOAD_WORDS; i++) {
		first += product(packet->payload[i], job->words[TAG_WORD + i]);
		second += product(packet->payload[i], job->words[TAG_WORD + i + 1]);
	}
	return siphash(job->sip, first, second, sizeof(*packet));
}

// --- payloads: `with` is combined into `into`, several elements per word ---

static __always_inline void copy(u64 *into, const u64 *with)
{
#pragma clang loop unroll_count(8)
	for (int i = 0; i < PAYLOAD_WORDS; i++)
		into[i] = with[i];
}

// `high` is the highest bit of each element. Carries never leave an element.
static __always_inline void add(u64 *into, const u64 *with, u64 high)
{
#pragma clang loop unroll_count(8)
	for (int i = 0; i < PAYLOAD_WORDS; i++) {
		u64 x = into[i], y = with[i];

		into[i] = ((x & ~high) + (y & ~high)) ^ ((x ^ y) & high);
	}
}

static __always_inline void byte_maximum(u64 *into, const u64 *with)
{
	const u64 high = 0x8080808080808080ULL;

#pragma clang loop unroll_count(8)
	for (int i = 0; i < PAYLOAD_WORDS; i++) {
		u64 x = into[i], y = with[i];
		u64 low_not_less = (x | high) - (y & ~high);
		u64 not_less = ((x & ~y) | (~(x ^ y) & low_not_less)) & high;
		u64 mask = (not_less >> 7) * 0xff;

		into[i] = (x & mask) | (y & ~mask);
	}
}

static __always_inline u64 high_bits(u8 width)
{
	if (width == 1)
		return 0x8080808080808080ULL;
	return width == 2 ? 0x8000800080008000ULL : 0x8000000080000000ULL;
}

// --- the table ---

// Adds a packet to the earlier packets of the same number in the entry. Called with the entry's lock held.
static __always_inline u64 *join(struct packet *packet, struct entry *entry, struct live *now,
				 u64 bit, u64 full, u64 high)
{
	const struct header *head = &packet->head;

	if (head->number < entry->number)
		return &now->dropped_old;
	if (head->number > entry->number || !entry->came) {
		entry->number = head->number;
		entry->came = 0;
		entry->done = 0;
		entry->kind = head->kind;
		entry->width = head->width;
		entry->began = now->now;
	}
	if (entry->kind != head->kind || entry->width != head->width)
		return &now->mismatched;
	if (entry->done)
		return &now->answered;
	if (entry->came & bit)
		return &now->repeated;
	if (!entry->came)
		copy(entry->payload, packet->payload);
	else if (head->kind == EXPONENTS)
		byte_maximum(entry->payload, packet->payload);
	else
		add(entry->payload, packet->payload, high);
	entry->came |= bit;
	if (entry->came != full)
		return &now->added;
	entry->done = 1;
	return &now->completed;
}

// The safe scheme of switch/protocol/switch.py. Returns XDP_TX if the sum is complete: the packet now contains
// the sum, sealed for the parent. Returns XDP_PASS if the sum is complete, but `sends` is 0: the packet is
// unchanged.
static __always_inline int sum(struct packet *packet, const struct job *job, struct entry *entry,
			       struct live *now, int sends)
{
	const u64 bit = 1ULL << ((packet->head.sender - job->first) & 63);
	const u64 full = ~0ULL >> ((64 - job->children) & 63);
	const u64 high = high_bits(packet->head.width);
	u64 *counter;
	int done;

	bpf_spin_lock(&entry->lock);
	counter = join(packet, entry, now, bit, full, high);
	done = counter == &now->completed || counter == &now->answered;
	if (done && sends)
		copy(packet->payload, entry->payload);
	bpf_spin_unlock(&entry->lock);
	__sync_fetch_and_add(counter, 1);
	if (!done)
		return XDP_DROP;
	if (!sends)
		return XDP_PASS;
	packet->head.sender = job->child;
	packet->head.tag = tag_of(packet, job);
	return XDP_TX;
}

static __always_inline int possible(const struct header *head, const struct job *job)
{
	if ((u16)(head->sender - job->first) >= job->children || head->number > MOST_NUMBER)
		return 0;
	if (head->kind == EXPONENTS)
		return head->width == 0;
	return head->width == 1 || head->width == 2 || head->width == 4;
}

// Handles a packet to a UDP port (in host order). The caller has checked the bounds of the packet. If this
// host does not know the parent's hardware address, the sum is left to user space: user space receives the
// packet, gets the sum from `add_packet` (which passes 1 for `always`), and sends the sum.
static __always_inline int take(struct packet *packet, u32 port, int always, struct job **of,
				struct live **now)
{
	const struct header *head = &packet->head;
	struct job *job = bpf_map_lookup_elem(&jobs, &port);
	struct entry *entry;
	int sends, verdict;
	void *table;
	u32 slot;

	if (!job || head->magic != MAGIC || head->version != VERSION || head->job != job->job)
		return XDP_PASS;
	if (head->kind != GRADIENT && head->kind != EXPONENTS)
		return XDP_PASS;
	slot = job->live;
	*now = bpf_map_lookup_elem(&live, &slot);
	table = bpf_map_lookup_elem(&tables, &port);
	if (!*now || !table || !job->slots || head->tag != tag_of(packet, job))
		return XDP_PASS;
	if (!possible(head, job)) {
		__sync_fetch_and_add(&(*now)->mismatched, 1);
		return XDP_DROP;
	}
	if (head->number < (*now)->acked) {
		__sync_fetch_and_add(&(*now)->dropped_old, 1);
		return XDP_DROP;
	}
	slot = head->number % job->slots;
	entry = bpf_map_lookup_elem(table, &slot);
	if (!entry)
		return XDP_PASS;
	*of = job;
	sends = always || (*now)->found;
	verdict = sum(packet, job, entry, *now, sends);
	if (verdict == XDP_PASS)
		__sync_fetch_and_add(&(*now)->handed_up, 1);
	return verdict;
}

// --- the two programs ---

static __always_inline void to_parent(struct ethhdr *ethernet, struct iphdr *ip,
				      struct udphdr *udp, const struct job *job,
				      const struct live *now)
{
	const u16 *words = (const u16 *)ip;
	u32 checksum = 0;

	__builtin_memcpy(ethernet->h_dest, now->parent, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, now->own, ETH_ALEN);
	ip->saddr = ip->daddr;
	ip->daddr = job->parent_host;
	ip->ttl = 64;
	ip->id = 0;
	ip->frag_off = bpf_htons(DONT_FRAGMENT);
	ip->check = 0;
	for (int i = 0; i < (int)sizeof(*ip) / 2; i++)
		checksum += words[i];
	checksum = (checksum & 0xffff) + (checksum >> 16);
	checksum = (checksum & 0xffff) + (checksum >> 16);
	ip->check = ~checksum;
	udp->source = udp->dest;
	udp->dest = job->parent_port;
	udp->check = 0; // no UDP checksum: the tag is stronger
}

SEC("xdp")
int take_packet(struct xdp_md *context)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ethhdr *ethernet = data;
	struct iphdr *ip = (void *)(ethernet + 1);
	struct udphdr *udp = (void *)(ip + 1);
	struct packet *packet = (void *)(udp + 1);
	const u16 udp_nbytes = sizeof(*udp) + sizeof(*packet);
	struct job *job = 0;
	struct live *now = 0;
	int verdict;

	if ((void *)(packet + 1) > end || ethernet->h_proto != bpf_htons(ETH_P_IP))
		return XDP_PASS;
	if (*(u8 *)ip != 0x45 || ip->protocol != IPPROTO_UDP ||
	    ip->frag_off & bpf_htons(FRAGMENT) ||
	    ip->tot_len != bpf_htons(sizeof(*ip) + udp_nbytes) || udp->len != bpf_htons(udp_nbytes))
		return XDP_PASS;
	verdict = take(packet, bpf_ntohs(udp->dest), 0, &job, &now);
	if (verdict != XDP_TX || !job || !now)
		return verdict;
	to_parent(ethernet, ip, udp, job, now);
	return XDP_TX;
}

// Handles a packet from user space: a UDP header, of which only the destination port is used, and a packet.
SEC("xdp")
int add_packet(struct xdp_md *context)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct udphdr *udp = data;
	struct packet *packet = (void *)(udp + 1);
	struct job *job;
	struct live *now;

	if ((void *)(packet + 1) > end)
		return XDP_PASS;
	return take(packet, bpf_ntohs(udp->dest), 1, &job, &now);
}

// Sends a packet back unchanged, to test whether packets that a program sends leave the device.
SEC("xdp")
int echo_packet(struct xdp_md *context)
{
	return XDP_TX;
}

char LICENSE[] SEC("license") = "Apache-2.0"; // required by no helper used here

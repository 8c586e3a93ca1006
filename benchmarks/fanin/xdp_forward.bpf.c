// A plain forwarder, for xdp.py: UDP over IPv4 goes back to where it came from, as it is.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

SEC("xdp")
int forward(struct xdp_md *context)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	struct ethhdr *ethernet = data;
	struct iphdr *ip = (void *)(ethernet + 1);
	struct udphdr *udp = (void *)(ip + 1);
	__u8 mac[ETH_ALEN];
	__u32 host;
	__u16 port;

	if ((void *)(udp + 1) > end || ethernet->h_proto != bpf_htons(ETH_P_IP) ||
	    ip->protocol != IPPROTO_UDP)
		return XDP_PASS;
	__builtin_memcpy(mac, ethernet->h_dest, ETH_ALEN);
	__builtin_memcpy(ethernet->h_dest, ethernet->h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, mac, ETH_ALEN);
	host = ip->daddr;
	ip->daddr = ip->saddr;
	ip->saddr = host;
	port = udp->dest;
	udp->dest = udp->source;
	udp->source = port;
	udp->check = 0;
	return XDP_TX;
}

// What makes the driver of a veth take what the other end's program sends.
SEC("xdp")
int pass(struct xdp_md *context)
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Apache-2.0";

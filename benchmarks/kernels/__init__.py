"""Update rules, sums and top-k beside torch's."""

"""Routes sorted by expert in plain torch."""


def group_reference(experts: list[int], num_experts: int, block: int) -> tuple[list, list, list]:
    """Each expert's routes in blocks of `block`, one expert after another.

    experts: of each route, -1 for none.
    Returns the first block of each expert and their number at the end, each block's expert, and
    each block's routes, -1 where empty.
    """
    first, block_experts, order = [], [], []
    for expert in range(num_experts):
        first.append(len(block_experts))
        routes = [route for route, its in enumerate(experts) if its == expert]
        for start in range(0, len(routes), block):
            some = routes[start : start + block]
            block_experts.append(expert)
            order.append(some + [-1] * (block - len(some)))
    return [*first, len(block_experts)], block_experts, order

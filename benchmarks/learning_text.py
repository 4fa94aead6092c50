"""What learning.md says beside its figures: the setting, and for each part what is asked and how to read the answer."""

SETTING = [
    "What each technique does to accuracy where two cores can train it. A training is one process with one thread:",
    "`podscale train` with a ResNet-18 of width 16 (0.7 M parameters, ImageNet's stem) on imagenette, 9,469",
    "photographs of ten classes, packed at a short side of 40 px (JPEG quality 95). Random crops of 0.35 to 1 of the",
    "area at 32 px, 12 epochs, label smoothing 0.1, momentum 0.9, decay 5e-4, three epochs of warm-up from 0, then",
    "polynomial decay of power 2 to 0; in parts (b) to (e) 8 epochs, two of them warm-up. Top-1 is",
    "that of the last evaluation, on 3,925 held-out photographs.",
    "",
    "Size and length were chosen by four pilot runs of SGD with Nesterov's momentum and cosine decay at batch 256:",
    "width 32 at 32 px and 6 epochs 56.1 %; width 16 at 64 px and 6 epochs 60.1 %, at 32 px and 15 epochs 64.8 % (64",
    "CPU seconds), at 48 px and 10 epochs 64.9 % (84 CPU seconds).",
    "",
    "Deviations are over seeds, which change initial weights, sample order and crops. `from the first` is the",
    "difference of the means to the first row with its 95 % interval (Student's t, pooled variance); where the",
    "interval holds 0, it is `within noise`. With three seeds only large effects can be told from noise.",
    "",
    "`python benchmarks/learning.py imagenette224.tar --work FOLDER` trains what FOLDER has no record of and writes",
    "this; where n is below 3, the rest was not trained yet. The machine was busy with other work meanwhile.",
    "Left out are trainings that were stopped: three of a sweep at batch 2,048, for lack of time, and one at batch 256",
    "within seconds.",
    "",
]

QUESTIONS = {
    "a": "Batch 4,096 is 43 % of the data set, 2.3 updates an epoch. At equal epochs, does LARS (You 2017; Ying 2018 "
    "with it) keep what SGD loses? Both have the same warm-up, decay, momentum and weight decay; each optimizer has a "
    "sweep of its learning rate by factors of 2 at each batch (three rates, up to two more where the best was at the "
    "edge), with the first of the three seeds, which flatters the chosen rates a little, alike for both. `Linear "
    "rule` is the best rate of SGD at batch 256 times batch / 256 (Goyal 2017).",
    "b": "Each of 64 ranks would have 4 images of a batch of 256 (a span smaller than a rank's batch is computed in "
    "sub-batches, so one process stands for all of them). Ying 2018 and Kumar 2019 share statistics in groups of ranks "
    "where the batch of one is too small. Running statistics are the mean over all groups, and evaluation uses them.",
    "c": "Autocast of the forward pass to bfloat16, with batch norm's statistics, the loss, master weights and the "
    "optimizer in fp32 (Ying 2018, Jia 2018).",
    "d": "Jia 2018 leaves decay off biases and batch norm, as MLPerf's reference does; LARS then takes no trust "
    "ratio of them either.",
    "e": "Codreanu 2017 ends a run with a short phase of doubled decay, quadratic learning-rate decay and crops "
    "without change of scale and aspect (reported: 75.6 to 76.1 % on ImageNet). All arms have the same 8 epochs.",
}

READING = {
    "a": "LARS is ahead of SGD at SGD's own best rate at every batch, and more so at the larger ones. The linear rule "
    "holds to batch 1,024, where it is as good as any rate of SGD, and ends at chance at 4,096. So the published "
    "effect shows in its direction. It does not show in its size: LARS does not keep the accuracy of batch 256. "
    "Equal epochs are 444 updates at batch 256 and 28 at 4,096, seven of them warm-up, and no rate makes up for "
    "that. ImageNet at batch 32,768 for 72 epochs still has about 2,800 updates, and that batch is 2.6 % of the "
    "data; here 1,024 is 11 % and 4,096 is 43 %. Weight decay and momentum were not tuned for either optimizer.",
    "b": "As published: small groups cost accuracy, and 4 images alone by far the most; 16 images lose a little, and "
    "64 are as good as the whole batch within noise. The cost of 4 is larger here than it would be at 224 px, "
    "because the last stage of this network has one pixel at 32 px: 4 images are 4 values a channel, where "
    "ResNet-50 at 224 px has 49 times as many. Training loss rises as accuracy falls, so the noise of the "
    "statistics costs in training already, not only through the gap to the running statistics of evaluation.",
    "c": "No loss that three seeds could show, and about a tenth less CPU time, on a processor with bfloat16 "
    "instructions.",
    "d": "No effect that three seeds could show. In 296 updates decay takes about a fifth off a parameter (the sum of "
    "learning rates times decay over 1 - momentum), and what it takes off a scale of batch norm the next layer "
    "can make good. Jia's runs are longer and at batches of 65,536; this scale cannot tell.",
    "e": "No gain that three seeds could show. The crops of the phase lower training loss, since they show more of "
    "each image. Why there is no more, we think: a run of 296 updates is far from converged, and gains most from "
    "learning on at a high rate, whereas the published phase came after 85 epochs; and 56 updates are too few for "
    "the doubled decay to do anything. The last arm, in which the decay came to 0 before the phase began again, "
    "was run by mistake and is kept because it was run.",
}
